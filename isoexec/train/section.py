"""The ``recipe`` section of a composed configuration, typed and checked. It is this package's; what remains is the run's and SkyRL's."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

from isoexec.contract import ContractError
from isoexec.contract.types import BACKENDS
from isoexec.train.tasks import Task


@dataclass(frozen=True)
class TaskSection:
    """Problems to draw; see :class:`isoexec.train.tasks.Task`. ``train`` and ``held_out`` count them."""

    generator: str
    train: int
    held_out: int
    config: dict = field(default_factory=dict)
    partial_credit: bool = False
    instruction: str = ""

    def __post_init__(self):
        for name in ("train", "held_out"):
            if getattr(self, name) < 1:
                raise ContractError(f"recipe.task.{name}: expected at least 1, found {getattr(self, name)}")

    def task(self) -> Task:
        """The problems without their number."""
        return Task(self.generator, self.config, self.partial_credit, self.instruction)


@dataclass(frozen=True)
class RecipeSection:
    """See recipes/base/isoexec.yaml for what each entry means."""

    name: str
    folder: str
    backend: str
    nodes: int = 1
    drop_long_prompts: bool = False
    task: TaskSection | None = None

    def __post_init__(self):
        if self.backend not in BACKENDS:
            raise ContractError(f"recipe.backend: expected {' or '.join(BACKENDS)}, found {self.backend!r}")
        if self.nodes < 1:
            raise ContractError(f"recipe.nodes: expected at least 1, found {self.nodes}")


def recipe_section(data: Mapping) -> RecipeSection:
    """The section from plain data.

    Raises:
        ContractError: an entry that is unknown, missing, of another type or outside its values; says which.
    """
    return _build(RecipeSection, data, "recipe")


def _build(cls, data, path: str):
    if not isinstance(data, Mapping):
        raise ContractError(f"{path}: expected a mapping, found {data!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(data) - set(fields)):
        raise ContractError(f"{path}: unknown {', '.join(map(str, unknown))}; expected {', '.join(fields)}")
    hints = typing.get_type_hints(cls)
    values = {name: _value(hints[name], value, f"{path}.{name}") for name, value in data.items()}
    for name, f in fields.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ContractError(f"{path}.{name}: must be given")
    return cls(**values)


def _value(hint, value, path: str):
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None:
        if type(None) in options:
            return None
        raise ContractError(f"{path}: must be given, as {path}=VALUE; docs/training.md tells of each recipe")
    [kind] = [option for option in options if option is not type(None)]
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, path)
    if type(value) is not kind:
        raise ContractError(f"{path}: expected {kind.__name__}, found {value!r}")
    return value
