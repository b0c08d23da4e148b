"""Environments of a run: those of skyrl-gym, and those that ``isoexec.environments`` names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import skyrl_gym
from skyrl_gym.envs.registration import registry

from isoexec.runtimes.skyrl.schema import ConfigError


def register(environments: Mapping[str, str], env_class: str) -> None:
    """Register ``environments`` with skyrl-gym, which would import them in the first step.

    Args:
        environments: name -> ``"module:Class"``.
        env_class: the environment of prompts that name none.

    Raises:
        ConfigError: one that cannot be imported, or whose name is taken; or ``env_class`` is none.
    """
    for name, entry in environments.items():
        module, _, cls = entry.partition(":")
        try:
            getattr(importlib.import_module(module), cls)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"isoexec.environments.{name}: {entry!r}: {error}; expected 'module:Class' on the Python path") from error
        known = registry.get(name)
        if known is None:
            skyrl_gym.register(id=name, entry_point=entry)
        elif known.entry_point != entry:
            raise ConfigError(f"isoexec.environments.{name}: this name stands for {known.entry_point!r} already; choose another")
    if env_class not in registry:
        expected = f"expected one of {', '.join(names())}, found {env_class!r}"
        raise ConfigError(f"environment.env_class: {expected}; isoexec.environments names others")


def names() -> list[str]:
    """Environments that prompts can name."""
    return sorted(registry)
