"""Types of a run's configuration, as its dataclasses declare them. SkyRL takes any value, and stumbles over it in an actor."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping


class ConfigError(ValueError):
    """A setting with which no run can start; one line that names it, what was expected, what was found and what to do."""


def check_types(config, schema: type, path: str = "", *, whole: bool = False) -> None:
    """Refuse values of other types than a dataclass declares, in its nested ones too.

    Args:
        config: nested, plain; entries that no field declares are not looked at.
        schema: the dataclass.
        path: of ``config`` within the configuration, for messages.
        whole: whether every field must be there.

    Raises:
        ConfigError: names the entry, its type and what was found.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path or 'configuration'}: expected a section of entries, found {_shown(config)}")
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        where, hint = f"{path}.{field.name}" if path else field.name, hints[field.name]
        if field.name not in config:
            if whole:
                raise ConfigError(f"{where}: must be given; an override took it out")
            continue
        value = config[field.name]
        if dataclasses.is_dataclass(hint):
            check_types(value, hint, where, whole=whole)
        elif not _fits(value, hint):
            raise ConfigError(f"{where}: expected {_named(hint)}, found {_shown(value)}")


def _fits(value, hint) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, kind) for kind in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        return isinstance(value, Mapping) and all(_fits(item, arguments[1]) for item in value.values() if arguments)
    return type(value) is hint or (hint is float and type(value) is int)


def _named(hint) -> str:
    """A type's name in a message; that an entry may also be null goes without saying."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(sorted(_named(kind) for kind in arguments if kind is not type(None)))
    if origin is list:
        return f"a list of {_named(arguments[0])}"
    if origin is dict and arguments[1] is not typing.Any:
        return f"a mapping to {_named(arguments[1])}"
    return "a mapping" if origin is dict or hint is dict or dataclasses.is_dataclass(hint) else hint.__name__


def _shown(value) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
