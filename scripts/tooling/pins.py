"""third_party/pins.toml: the upstream releases and files this project is built from."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

from common import ROOT, Stop


@dataclasses.dataclass(frozen=True)
class File:
    """One file of the package index."""

    project: str
    version: str
    archive: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Tree(File):
    """A source tree: a submodule at `commit`, or the release archive. `generated` is no part of it."""

    name: str
    commit: str
    generated: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Pins:
    trees: dict[str, Tree]
    wheels: dict[str, File]

    def tree(self, name: str) -> Tree:
        if name not in self.trees:
            raise Stop("unknown tree", expected="one of " + ", ".join(self.trees), found=name, do="name one of these")
        return self.trees[name]


def load(path: Path = ROOT / "third_party" / "pins.toml") -> Pins:
    table = tomllib.loads(path.read_text())
    return Pins(
        trees={name: Tree(name=name, **{**pin, "generated": tuple(pin["generated"])}) for name, pin in table["tree"].items()},
        wheels={name: File(**pin) for name, pin in table["wheel"].items()},
    )
