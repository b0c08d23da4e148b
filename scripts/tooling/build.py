"""scripts/build: pristine trees + patches + one environment per backend.

    build/<backend>/{vllm,megatron,skyrl}   upstream (git tag `upstream`) and one commit per patch
    build/<backend>/venv                    the locked dependencies; the trees and isoexec installed editable

Every step leaves a stamp: a digest of what it was made from. A step whose stamp is right is skipped; a step
that was interrupted has none and is done again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Callable, Iterator

import index
import install
import pins as pins_module
import vendor
from common import ROOT, Stop, main, write_atomically
from pins import Tree
from series import Series
from trees import EXCLUDE, BuildTree, apply_series, initialise

MODULES = {"vllm": "vllm", "megatron": "megatron.core", "skyrl": "skyrl"}
#: Seconds after which a step that prints nothing says that it goes on.
QUIET = 15.0
VERSION_SUFFIX = {"cpu": "+cpu", "cuda": "+precompiled"}


def detect_backend() -> str:
    """cuda if an NVIDIA GPU is visible, else cpu."""
    smi = shutil.which("nvidia-smi")
    if smi and subprocess.run([smi, "-L"], capture_output=True, text=True).stdout.startswith("GPU"):
        return "cuda"
    return "cuda" if any(Path("/proc/driver/nvidia/gpus").glob("*")) else "cpu"


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextlib.contextmanager
def still_running(start: float) -> Iterator[None]:
    """Say every :data:`QUIET` seconds that a step goes on: some wait for a resolver or a compiler that prints nothing."""
    ended = threading.Event()

    def say() -> None:
        while not ended.wait(QUIET):
            print(f"    still running, {time.monotonic() - start:.0f} s", flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Build:
    """One run for one backend. Steps are methods in the order of `run`."""

    def __init__(self, backend: str):
        self.backend = backend
        self.folder = ROOT / "build" / backend
        self.venv = self.folder / "venv"
        self.pins = pins_module.load()
        self.wheel = self.pins.wheels[backend]
        self.stamps = self.folder / ".stamps"
        self.done = 0

    def step(self, name: str, key: str, action: Callable[[], object], why: str) -> None:
        """Do `action` unless the stamp `name` says that it was done for `key`."""
        stamp = self.stamps / name
        if stamp.exists() and stamp.read_text() == key:
            return
        print(f"==> {name}: {why}", flush=True)
        start = time.monotonic()
        stamp.unlink(missing_ok=True)
        with still_running(start):
            action()
        write_atomically(stamp, key)
        self.done += 1
        print(f"    {time.monotonic() - start:.1f} s", flush=True)

    def run(self) -> None:
        start = time.monotonic()
        self.stamps.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Stop(f"another build of {self.folder} is running", do="wait for it to end") from None
            self._steps()
        what = f"{self.done} steps done" if self.done else "nothing to do"
        print(f"build/{self.backend}: {what}, {time.monotonic() - start:.1f} s")

    def _steps(self) -> None:
        trees = self.pins.trees.values()
        if not all(map(vendor.is_filled, trees)):
            (self.stamps / "third_party").unlink(missing_ok=True)
        self.step("third_party", digest([vendor.source(tree) for tree in trees]), self.fill, "obtaining the releases, filling the source folders")

        environment = digest(self.lock_text(), sys.executable, platform.python_version(), str(self.venv))
        self.step("environment", environment, self.environment, "installing the locked dependencies")
        for tree in trees:
            self.tree_steps(tree, environment)
        recipe = digest(environment, (ROOT / "pyproject.toml").read_text())
        self.step("install-isoexec", recipe, self.install_isoexec, "installing it editable")
        if self.backend == "cuda":
            self.step("providers", digest(recipe, self.wheel.sha256), self.install_providers, "taking the kernels that ops load from the wheel")
            install.share_attention(self.venv, self.folder / "vllm")

    @functools.cached_property
    def archives(self) -> dict[str, Path]:
        """File name -> path of every file that a build starts from, obtained together; a build with nothing to do asks for none."""
        return vendor.obtain([tree for tree in self.pins.trees.values() if not vendor.source(tree).startswith("commit")] + [self.wheel])

    def fill(self) -> None:
        _ = self.archives  # before the first step that takes long
        vendor.fill(self.pins)

    @staticmethod
    def lock_text() -> str:
        """The lock without comments, which may change while nothing else does."""
        return "".join(line for line in install.LOCK.read_text().splitlines(True) if not line.lstrip().startswith("#"))

    def environment(self) -> None:
        for stamp in self.stamps.glob("install-*"):  # sync takes out whatever the lock does not name
            stamp.unlink()
        install.create_environment(index.find_uv(), self.venv)

    def tree_steps(self, tree: Tree, environment: str) -> None:
        built, series = BuildTree(tree.name, self.folder / tree.name), Series.of(tree.name)
        pristine = digest(vendor.source(tree), tree.generated, EXCLUDE)
        if not built.exists():
            (self.stamps / f"tree-{tree.name}").unlink(missing_ok=True)
        self.step(f"tree-{tree.name}", pristine, lambda: self.new_tree(tree, built, series), f"{tree.project} {tree.version}, pristine")
        self.step(f"patches-{tree.name}", digest(pristine, series.digest()), lambda: self.apply(built, series),
                  f"applying patches/{tree.name}")
        recipe_files = [(built.path / name).read_text() for name in install.RECIPE_FILES if (built.path / name).exists()]
        recipe = digest(environment, pristine, recipe_files, self.wheel.sha256 if tree.name == "vllm" else "", str(built.path))
        self.step(f"install-{tree.name}", recipe, lambda: self.install_tree(tree, built.path), "installing it editable")

    def new_tree(self, tree: Tree, built: BuildTree, series: Series) -> None:
        for stamp in (f"patches-{tree.name}", f"install-{tree.name}"):
            (self.stamps / stamp).unlink(missing_ok=True)
        if built.exists() and (work := built.unexported(series) + built.edited()):
            raise Stop(f"{built.path} must be made anew and holds work that is not in {series.folder}", expected="only commits of the series",
                       found="\n".join(work), do=f"keep it with `scripts/patches export {tree.name}`, or remove the folder; then run it again")
        scratch = self.folder / f".{tree.name}.new"
        shutil.rmtree(scratch, ignore_errors=True)
        vendor.write_pristine(tree, scratch)
        initialise(scratch, tree.generated)
        shutil.rmtree(built.path, ignore_errors=True)
        scratch.replace(built.path)

    @staticmethod
    def apply(built: BuildTree, series: Series) -> None:
        print(f"    {len(series.names())} patches, {apply_series(built, series)} applied anew", flush=True)

    def install_tree(self, tree: Tree, path: Path) -> None:
        wheel = self.archives[self.wheel.archive]
        if tree.name == "vllm":
            install.unpack_extensions(wheel, path)
        install.install_editable(index.find_uv(), self.venv, path, install.install_environment_variables(tree, self.backend, wheel))
        suffix = VERSION_SUFFIX[self.backend] if tree.name == "vllm" else ""
        module = MODULES[tree.name]
        install.confirm(self.venv, tree.project, module, tree.version + suffix, path.joinpath(*module.split(".")))

    def install_providers(self) -> None:
        install.install_providers(self.venv, self.archives[self.wheel.archive])

    def install_isoexec(self) -> None:
        install.install_editable(index.find_uv(), self.venv, ROOT, {})


def clean() -> None:
    """Remove build/, unless a tree in it holds work that exists nowhere else."""
    work = []
    for path in sorted((ROOT / "build").glob("*/*/.git")):
        tree = BuildTree(path.parent.name, path.parent)
        if tree.exists():
            work += [f"{tree.path.relative_to(ROOT)}: {line}" for line in tree.unexported(Series.of(tree.name)) + tree.edited()]
    if work:
        raise Stop("build/ holds work that is in no series", expected="only commits of the series", found="\n".join(work),
                   do="`scripts/patches export` keeps it; removing build/ yourself drops it")
    shutil.rmtree(ROOT / "build", ignore_errors=True)


def build(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if an NVIDIA GPU is visible, else cpu")
    parser.add_argument("--which", action="store_true", help="only print the backend's name")
    parser.add_argument("--clean", action="store_true", help="only remove build/")
    options = parser.parse_args(arguments)
    if options.clean:
        clean()
        return
    backend = detect_backend() if options.backend == "auto" else options.backend
    if options.which:
        print(backend)
        return
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        raise Stop("this machine is not one the official wheels are for", expected="Linux on x86_64", found=f"{sys.platform} on {platform.machine()}",
                   do="build on such a machine, or in a container of one")
    Build(backend).run()


if __name__ == "__main__":
    main(build)
