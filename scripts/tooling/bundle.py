"""scripts/bundle: everything `make build` downloads, in one folder for a machine without an index.

    DIR/*.tar.gz, *.whl    the upstream archives and wheels of third_party/pins.toml
    DIR/wheels/            the locked dependencies and uv: for each the wheel this machine would install, else the source

There: `ISOEXEC_ARCHIVES=DIR make build`. Every hash is checked again on the way in.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    from packaging.tags import sys_tags
    from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
except ImportError:  # a bare Python has it inside pip
    from pip._vendor.packaging.tags import sys_tags
    from pip._vendor.packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

import index
import pins as pins_module
import vendor
from common import ROOT, Stop, main
from pins import File


def place(source: Path, target: Path) -> None:
    """A hard link where the file systems allow it, else a copy."""
    if not target.exists():
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def choose(files: list[str], order: dict) -> dict[str, str]:
    """Project -> the file to take: the wheel whose best tag comes first in `order`, else the source archive."""
    best: dict[str, tuple[int, str]] = {}
    for name in files:
        if name.endswith(".whl"):
            project, _, _, tags = parse_wheel_filename(name)
            rank = min((order[tag] for tag in tags if tag in order), default=None)
        elif name.endswith(".tar.gz"):
            project, rank = parse_sdist_filename(name)[0], len(order)
        else:
            continue
        if rank is not None:
            best[project] = min(best.get(project, (rank, name)), (rank, name))
    return {project: name for project, (_, name) in best.items()}


def download_locked(lock: Path, target: Path) -> None:
    """Fetch one file for every package of the lock; the hash must be one the lock allows."""
    text = lock.read_text()
    pinned = re.findall(r"^([a-z0-9._-]+)(?:\[.*\])?==([^\s;]+)", text, re.M)
    known = index.resolve([f"{project}=={version}" for project, version in pinned])
    chosen = choose(list(known), {tag: rank for rank, tag in enumerate(sys_tags())})
    if missing := {canonicalize_name(project) for project, _ in pinned} - chosen.keys():
        raise Stop("the index has no file for this machine", expected="a wheel or a source archive of each locked package",
                   found=", ".join(sorted(missing)), do="bundle on a machine of the kind that will build, or move the pin")

    def fetch(name: str) -> None:
        address, digest = known[name]
        if f"sha256:{digest}" not in text:
            raise Stop(f"the index serves a {name} that {lock.name} does not allow", expected="one of the locked hashes", found=digest,
                       do="do not use that index, or run `make lock` if the release was made anew")
        if not (target / name).exists():
            index.fetch(address, target / name, digest)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(fetch, name) for name in chosen.values()]:
            done.result()


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
        download_locked(ROOT / "requirements" / f"{lock}.txt", target / "wheels")
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target}: {size / 2**30:.1f} GiB; use it with ISOEXEC_ARCHIVES={target} make build")


if __name__ == "__main__":
    main(bundle)
