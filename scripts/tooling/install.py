"""Putting the environment and the trees into it: build/<backend>/venv."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import index
from common import ROOT, Stop, disk_full, run, says_disk_full
from pins import Tree

LOCK = ROOT / "requirements" / "stack.txt"
# Files that decide how a tree is installed; every other edit reaches an editable install by itself.
RECIPE_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
_PROGRESS = re.compile(r"^ *(Using|Resolved|Prepared|Downloading|Downloaded|Building|Built|Installed|Uninstalled)\b")


def _show_progress(command: list[object], env: dict[str, str], do: str) -> None:
    """Run uv, showing its progress lines as they come; a failure is a Stop with the rest of what it said."""
    process = subprocess.Popen([str(word) for word in command], env={**os.environ, **env}, text=True, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if _PROGRESS.match(line):
            print("    " + line.strip(), flush=True)
    if process.wait() != 0:
        output = "".join(lines)
        if says_disk_full(output):
            raise disk_full("while installing")
        raise Stop("the environment could not be installed", expected=f"what {LOCK.relative_to(ROOT)} locks, hashes included",
                   found=output.strip()[-2500:], do=do)


def _offline_options() -> list[str]:
    wheels = index.bundled_wheels()
    return ["--offline", "--no-index", "--find-links", str(wheels)] if wheels else []


def locked(*names: str) -> str:
    """The lock's entries for `names`, hashes included."""
    entries = re.findall(r"^\S.*(?:\n +--hash.*)*", LOCK.read_text(), re.M)
    return "\n".join(entry for entry in entries if entry.split("==")[0] in names) + "\n"


def create_environment(uv: str, venv: Path) -> None:
    """A fresh or updated environment that holds exactly the lock.

    A few pure-Python dependencies exist as source archives only. Building them in isolation would fetch a
    setuptools that no lock names, so ours goes in first and builds them.
    """
    python = venv / "bin" / "python"
    if not (python.exists() and run(python, "-c", "", check=False).returncode == 0):
        shutil.rmtree(venv, ignore_errors=True)
        run(uv, "venv", "-q", "--no-project", "--python", sys.executable, venv)
    do = ("a hash that differs: do not use that index; a missing file or no network: check the index settings of pip or uv\n"
          "(PIP_INDEX_URL, UV_DEFAULT_INDEX) or use a bundle (`make bundle`, ISOEXEC_ARCHIVES); then run it again")
    options = ["--require-hashes", "--python", python, *_offline_options()]
    builders = venv / "builders.txt"
    builders.write_text(locked("setuptools"))
    _show_progress([uv, "pip", "install", "--no-deps", *options, "--requirements", builders], index.environment(), do)
    # Bytecode once here, as pip does: a run starts up to a dozen processes at a time, each of which would compile what it imports.
    _show_progress([uv, "pip", "sync", *options, "--no-build-isolation", "--compile-bytecode", LOCK], index.environment(), do)


def unpack_extensions(wheel: Path, tree: Path) -> None:
    """Put every compiled extension of the wheel into the tree.

    vLLM's own precompiled recipe leaves out _C_AVX2 and _C_AVX512, which its CPU platform loads on machines
    without avx512_bf16.
    """
    with zipfile.ZipFile(wheel) as packed:
        for member in packed.namelist():
            if member.startswith("vllm/") and member.endswith(".so"):
                (tree / member).unlink(missing_ok=True)  # it may be a link (share_attention)
                packed.extract(member, tree)


def install_providers(venv: Path, wheel: Path) -> None:
    """Put the compiled kernels that isoexec's ops load under the environment, each verified."""
    run(venv / "bin" / "python", "-m", "isoexec.ops._core.provider", wheel)


def share_attention(venv: Path, tree: Path) -> None:
    """Make vLLM's FlashAttention 3 a link to the provider's file: torch registers a library's ops once in a process, by its file."""
    link_attention(venv / "share" / "isoexec" / "providers", tree / "vllm")


def link_attention(providers: Path, package: Path) -> None:
    """The link of :func:`share_attention`, relative, from vLLM's ``package`` to the folder ``providers``."""
    name = "_vllm_fa3_C.abi3.so"
    link, target = package / "vllm_flash_attn" / name, providers / "flash_attention_3" / name
    if not link.is_symlink():
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))


def install_environment_variables(tree: Tree, backend: str, wheel: Path) -> dict[str, str]:
    if tree.name == "vllm":
        return {"SETUPTOOLS_SCM_PRETEND_VERSION": tree.version, "VLLM_TARGET_DEVICE": backend, "VLLM_USE_PRECOMPILED": "1",
                "VLLM_PRECOMPILED_WHEEL_LOCATION": str(wheel)}
    if tree.name == "megatron":
        return {"NO_VCS_VERSION": "1"}  # else its version would name a commit of the build tree
    return {}


def install_editable(uv: str, venv: Path, path: Path, env: dict[str, str]) -> None:
    """Install the project at `path` editable, without dependencies (the lock has them) and without the network."""
    run(uv, "pip", "install", "-q", "--python", venv / "bin" / "python", "--offline", "--no-deps", "--no-build-isolation", "--reinstall",
        "--editable", path, env=env)


_WHERE = """
import importlib.metadata, importlib.util, json, sys
project, module = sys.argv[1:]
try:
    spec = importlib.util.find_spec(module)
    print(json.dumps([importlib.metadata.version(project), list(spec.submodule_search_locations)]))
except (AttributeError, ImportError) as error:
    print(json.dumps([repr(error), []]))
"""


def confirm(venv: Path, project: str, module: str, version: str, path: Path) -> None:
    """Refuse unless the environment imports `module` from `path` under exactly this version."""
    found_version, places = json.loads(run(venv / "bin" / "python", "-I", "-c", _WHERE, project, module).stdout)
    if found_version != version or str(path) not in places:
        raise Stop(f"{project} is not installed as it should be", expected=f"{version} from {path}", found=f"{found_version} from {places}",
                   do=f"remove {venv} and run `make build` again")
