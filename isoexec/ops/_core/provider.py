"""Provider binaries: compiled kernels taken from an official wheel, at a path of ours, pinned by hash.

A process that runs an op never imports the package the wheel belongs to. A provider that is missing or differs is refused: another binary may
add in another order. Install: ``python -m isoexec.ops._core.provider WHEEL [FOLDER]``.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from isoexec.contract import ContractError

#: Folder of the providers, if it is not ``<environment>/share/isoexec/providers``. A place, not a choice: contents are pinned.
PROVIDERS_VARIABLE = "ISOEXEC_PROVIDERS"


@dataclass(frozen=True)
class Provider:
    """Files of one wheel under ``prefix`` (those whose path starts with one of ``parts``), and the sha256 of their names and contents."""

    name: str
    version: str
    prefix: str
    parts: tuple[str, ...]
    sha256: str


_EXTENSION = "_C.cpython-312-x86_64-linux-gnu.so"
PROVIDERS = {
    p.name: p
    for p in (
        Provider("deep_gemm", "2.5.0", "vllm/third_party/deep_gemm/", (_EXTENSION, "include/"), "29766fd86b71db90b9c61311490daed5a19dd3d3f1c9aaffd09135711fce3411"),
        Provider("flash_attention_3", "vllm 0.23.0", "vllm/vllm_flash_attn/", ("_vllm_fa3_C.abi3.so",), "264b4aeae5b4632696e920d07a8e605c4ec11eec4f63359399624b3c5cd10f48"),
    )
}


def folder() -> Path:
    """Where providers are installed."""
    return Path(os.environ.get(PROVIDERS_VARIABLE) or Path(sys.prefix, "share", "isoexec", "providers"))


def digest(root: Path) -> str:
    """sha256 over relative path and contents of every file under ``root``, in path order."""
    h = hashlib.sha256()
    for name in sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()):
        h.update(f"{name}\0{(root / name).stat().st_size}\0".encode())
        with open(root / name, "rb") as f:
            while piece := f.read(1 << 20):
                h.update(piece)
    return h.hexdigest()


@functools.lru_cache(maxsize=None)
def provided(name: str) -> Path:
    """Folder of provider ``name``, its contents verified once per process.

    Raises:
        ContractError: it is not installed, or its contents are not the pinned ones.
    """
    return check(PROVIDERS[name], folder() / name)


def check(provider: Provider, root: Path) -> Path:
    if not root.is_dir():
        raise ContractError(
            f"provider {provider.name} ({provider.version}) is not installed at {root}; run python -m isoexec.ops._core.provider WHEEL with the "
            f"pinned wheel, or point {PROVIDERS_VARIABLE} at its folder"
        )
    found = digest(root)
    if found != provider.sha256:
        raise ContractError(
            f"provider {provider.name} at {root}: expected sha256 {provider.sha256}, found {found}; remove it and install the pinned wheel's"
        )
    return root


def install(wheel: Path, into: Path) -> None:
    """Unpack every provider from ``wheel`` and verify it."""
    with zipfile.ZipFile(wheel) as archive:
        for provider in PROVIDERS.values():
            for name in archive.namelist():
                inner = name.removeprefix(provider.prefix)
                if inner != name and inner.startswith(provider.parts) and not name.endswith("/"):
                    target = into / provider.name / inner
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
            check(provider, into / provider.name)


def parse(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m isoexec.ops._core.provider", description="Installs the pinned provider binaries out of a wheel.")
    parser.add_argument("wheel", metavar="WHEEL", type=Path, help="the official vLLM wheel that carries them")
    parser.add_argument("into", metavar="FOLDER", type=Path, nargs="?", default=folder(), help="where to; default: %(default)s")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    install(options.wheel, options.into)


if __name__ == "__main__":
    main()
