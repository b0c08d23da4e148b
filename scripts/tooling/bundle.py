"""scripts/bundle: everything `make build` downloads, in one folder for a machine without an index.

    DIR/*.tar.gz, *.whl    the upstream archives and wheels of third_party/pins.toml
    DIR/wheels/            the locked dependencies and uv, as pip chooses them for this machine

There: `ISOEXEC_ARCHIVES=DIR make build`. Every hash is checked again on the way in.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import pins as pins_module
import vendor
from common import ROOT, main, run
from pins import File


def place(source: Path, target: Path) -> None:
    """A hard link where the file systems allow it, else a copy."""
    if not target.exists():
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def bundle(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bundle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cpu", "cuda", "all"), default="all", help="whose vLLM wheel")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "out" / "bundle")
    options = parser.parse_args(arguments)
    pins = pins_module.load()
    wheels: list[File] = [file for name, file in pins.wheels.items() if options.backend in (name, "all")]
    target = options.folder.resolve()
    (target / "wheels").mkdir(parents=True, exist_ok=True)
    for name, path in vendor.obtain([*pins.trees.values(), *wheels]).items():
        place(path, target / name)
    for lock in ("uv", "stack"):
        print(f"    downloading what requirements/{lock}.txt locks (stack: about 4 GB)", flush=True)
        run(sys.executable, "-m", "pip", "download", "-q", "--require-hashes", "--no-deps", "--dest", target / "wheels",
            "-r", ROOT / "requirements" / f"{lock}.txt")
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target}: {size / 2**30:.1f} GiB; use it with ISOEXEC_ARCHIVES={target} make build")


if __name__ == "__main__":
    main(bundle)
