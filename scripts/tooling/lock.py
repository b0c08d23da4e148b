"""scripts/lock: write requirements/stack.txt (the environment) and requirements/uv.txt (the installer).

The input is requirements/stack.in plus what the vLLM release itself declares in requirements/common.txt, read
from its archive. The result names versions and hashes and no index. A release already locked is kept unless
--upgrade is given, so that a new pin moves as little as possible.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tarfile

import index
import pins as pins_module
import vendor
from common import ROOT, Stop, main, run

REQUIREMENTS = ROOT / "requirements"


def declared_by_vllm() -> str:
    """vLLM's common requirements without comments and without the torch family, which stack.in pins."""
    tree = pins_module.load().trees["vllm"]
    with tarfile.open(vendor.obtain([tree])[tree.archive]) as tar:
        text = tar.extractfile(f"{tree.archive.removesuffix('.tar.gz')}/requirements/common.txt").read().decode()
    lines = [line.split(" #")[0].strip() for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("#") and not re.match(r"torch", line))


def compile_lock(name: str, extra: str, upgrade: bool) -> None:
    work = ROOT / ".cache" / "lock"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copy(REQUIREMENTS / f"{name}.in", work)
    (work / "vllm-common.in").write_text(extra)
    target = REQUIREMENTS / f"{name}.txt"
    if target.exists():
        shutil.copy(target, work)
    inputs = [f"{name}.in", *(["vllm-common.in"] if extra else [])]
    run(index.find_uv(), "pip", "compile", "-q", "--generate-hashes", "--no-header", "--no-emit-index-url", "--python-version", "3.12",
        "--python-platform", "x86_64-manylinux_2_28", *(["--upgrade"] if upgrade else []), *inputs, "-o", f"{name}.txt",
        cwd=work, env=index.environment())
    text = (work / f"{name}.txt").read_text()
    if found := re.findall(r"^.*(?:://|--index|--find-links).*$", text, re.M):
        raise Stop(f"the lock {name}.txt names an address", expected="versions and hashes only", found="\n".join(found), do="remove it from the input")
    target.write_text(text)
    print(f"requirements/{name}.txt: {len(re.findall('^[a-z0-9].*==', text, re.M))} packages")


def lock(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/lock", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest release of everything not pinned")
    options = parser.parse_args(arguments)
    compile_lock("uv", "", options.upgrade)
    compile_lock("stack", declared_by_vllm(), options.upgrade)


if __name__ == "__main__":
    main(lock)
