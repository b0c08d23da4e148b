"""A recipe and its overrides, composed by Hydra into one configuration: the run's, with every key of SkyRL, and the ``recipe`` section."""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from isoexec.contract import ContractError
from isoexec.runtimes.skyrl.config import TrainConfig
from isoexec.runtimes.skyrl.schema import ConfigError, check_types

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

OmegaConf.register_new_resolver("isoexec.times", lambda a, b: a * b, replace=True)


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """Names of the recipes in ``folder``."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def compose(recipe: str, overrides: list[str], folder: Path = RECIPES) -> DictConfig:
    """The configuration of ``recipe``, resolved, with every key of SkyRL.

    Args:
        overrides: in Hydra's grammar, e.g. ``trainer.train_batch_size=16``, ``hardware=gpu``, ``+recipe.task.config.min_digits=2``.

    Raises:
        ContractError: unknown recipe, a file that is no YAML, an override that does not parse or names no key, a value of another type.
    """
    if recipe not in recipe_names(folder):
        raise ContractError(f"recipe {recipe!r} is unknown; there are {', '.join(recipe_names(folder))}")
    ConfigStore.instance().store(name="skyrl", node=_defaults(TrainConfig), package="_global_", provider="skyrl")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = hydra_compose(recipe, overrides)
        if not OmegaConf.is_dict(config.get("recipe")) or "folder" not in config.recipe:
            raise ConfigError("recipe: expected the section that `base: isoexec` among its defaults begins; it has no folder")
        config.recipe.folder = str(folder)
        if OmegaConf.select(config, "isoexec.seed", default=0) is None:
            raise ConfigError("isoexec.seed: expected a whole number, from which problems and samples are drawn, found null")
        plain = OmegaConf.to_container(config, resolve=True)
        check_types(plain, TrainConfig, whole=True)
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeError, ConfigError) as error:
        said = _one_line(error)
        if overrides and (unknown := re.match(r"Could not override '([^']+)'", said)):
            groups = [path.name for path in folder.iterdir() if path.is_dir()]
            said = _no_such_key(unknown[1], [*groups, *_paths(OmegaConf.to_container(compose(recipe, [], folder)))])
        raise ContractError(f"recipe {recipe}: {said}") from error
    return OmegaConf.create(plain)


def _no_such_key(key: str, names: list[str]) -> str:
    """That a key is in no file, and which ones have its name, or nearly so."""
    alike = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]] or difflib.get_close_matches(key, names, 3, 0.8)
    meant = f"; there is {' and '.join(alike[:3])}" if alike else ""
    return f"no key {key!r}{meant}; one that is in no file is added with +{key}=VALUE, --cfg job prints all that are"


def _paths(section: dict, prefix: str = ""):
    for name, value in section.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{name}.")


def as_yaml(config: DictConfig) -> str:
    """What ``--cfg job`` prints."""
    return OmegaConf.to_yaml(config, sort_keys=False)


def _defaults(cls) -> dict:
    """Defaults of a config dataclass as declared. An instance also holds values derived from others, which an override would not move."""
    found = {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default_factory):
            found[field.name] = _defaults(field.default_factory)
        else:
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            found[field.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
    return found


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return re.sub(r"^Error merging override ", "override ", text)
