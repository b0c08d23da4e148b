"""A miniature of this repository: the real tools, tiny upstream releases, no network."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "tooling"))

MODULE = "".join(f"def f{n}(x):\n    return x + {n}\n\n\n" for n in range(12))
MESSAGE = """{subject}

The two sides differ here without it.

Ops: none: portability
Upstream-status: inappropriate
Drop-when: never
"""


def release(path: Path, name: str, files: dict[str, str]) -> str:
    """Write a source archive with the one top folder `name`; returns its sha256."""
    with tarfile.open(path, "w:gz") as tar:
        for file, text in files.items():
            member = tarfile.TarInfo(f"{name}/{file}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


class House:
    """The miniature at `root`; its archives in `archives`, its pins for the three trees."""

    def __init__(self, root: Path):
        self.root, self.archives = root, root / "given"
        shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        self.archives.mkdir()
        pins = []
        for tree in ("vllm", "megatron", "skyrl"):
            digest = release(self.archives / f"{tree}-1.0.tar.gz", f"{tree}-1.0", {
                "pyproject.toml": f"# {tree}\n", f"{tree}/module.py": MODULE, f"{tree}.egg-info/PKG-INFO": "generated\n", ".gitignore": "*.md\n", "a.md": "a\n"})
            pins.append(f'[tree.{tree}]\nproject = "{tree}"\nversion = "1.0"\ncommit = "{"0" * 40}"\narchive = "{tree}-1.0.tar.gz"\n'
                        f'sha256 = "{digest}"\ngenerated = ["{tree}.egg-info"]\n')
        with zipfile.ZipFile(self.archives / "w.whl", "w") as wheel:
            wheel.writestr("vllm/_C.so", "binary")
        digest = hashlib.sha256((self.archives / "w.whl").read_bytes()).hexdigest()
        for backend in ("cpu", "cuda"):
            pins.append(f'[wheel.{backend}]\nproject = "vllm"\nversion = "1.0"\narchive = "w.whl"\nsha256 = "{digest}"\n')
        for folder in ("requirements", *(f"third_party/{tree}" for tree in ("vllm", "megatron", "skyrl"))):
            (root / folder).mkdir(parents=True)
        (root / "third_party" / "pins.toml").write_text("\n".join(pins))
        (root / "requirements" / "stack.txt").write_text("torch==2.11.0 --hash=sha256:0\n")
        (root / "pyproject.toml").write_text("")
        self.env = {**os.environ, "ISOEXEC_ARCHIVES": str(self.archives), "ISOEXEC_PYTHON": sys.executable, "BACKEND": "cpu"}

    def tool(self, *words: object, env: dict[str, str] | None = None, ok: bool = True) -> str:
        """Run scripts/<words>; returns what it said, having checked whether it succeeded."""
        done = subprocess.run([str(self.root / "scripts" / str(words[0])), *map(str, words[1:])], cwd=self.root, text=True,
                              env={**self.env, **(env or {})}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert (done.returncode == 0) == ok, done.stdout
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout

    def build(self, ok: bool = True, kill_at: str = "", kill_after: str = "", fail_at: str = "", backend: str = "cpu") -> str:
        """`scripts/build` without the environment (test_build_environment.py has it).

        `kill_at`, `fail_at`: a function (module.name) that instead of running kills the process, or finds the disk full.
        `kill_after`: one that runs and then kills; module.name:N at its N-th call.
        """
        driver = f"""
import errno, os, pathlib, signal, sys
sys.path.insert(0, {str(self.root / "scripts" / "tooling")!r})
import build, common, install, trees, vendor
install.create_environment = lambda uv, venv: venv.mkdir(exist_ok=True)
install.install_editable = lambda uv, venv, path, env: print("    editable", path.name)
install.confirm = lambda *a: None
build.index.find_uv = lambda: "uv"

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def fill_the_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def hook(where, act, after=False):
    place, _, nth = where.partition(":")
    module, name = place.split(".")
    owner = pathlib.Path if module == "Path" else sys.modules[module]
    real, calls = getattr(owner, name), []
    def hooked(*a, **k):
        calls.append(name)
        if not after:
            act()
        result = real(*a, **k)
        if len(calls) == int(nth or 1):
            act()
        return result
    setattr(owner, name, hooked)

for where, act, after in (({kill_at!r}, kill, False), ({kill_after!r}, kill, True), ({fail_at!r}, fill_the_disk, False)):
    if where:
        hook(where, act, after)
common.main(lambda _: build.build(["--backend", {backend!r}]))
"""
        done = subprocess.run([sys.executable, "-B", "-c", driver], cwd=self.root, env=self.env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert (done.returncode == 0) == ok, done.stdout
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout

    def tree(self, name: str = "skyrl") -> Path:
        return self.root / "build" / "cpu" / name

    def git(self, *words: str, tree: str = "skyrl") -> str:
        identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.invalid"]
        return subprocess.run(["git", *identity, *words], cwd=self.tree(tree), text=True, check=True, capture_output=True).stdout

    def commit(self, subject: str, old: str, new: str, tree: str = "skyrl", message: str = MESSAGE) -> None:
        """Commit one edit of module.py in the build tree."""
        path = self.tree(tree) / tree / "module.py"
        text = path.read_text()
        assert text.count(old) == 1, (old, text)
        path.write_text(text.replace(old, new))
        self.git("commit", "-qam", message.format(subject=subject), tree=tree)

    def patch(self, name: str, tree: str = "skyrl") -> Path:
        return self.root / "patches" / tree / name

    def copy_to(self, root: Path) -> House:
        """The same at another place (build trees are git repositories and do not mind)."""
        shutil.copytree(self.root, root, symlinks=True)
        copy = House.__new__(House)
        copy.root, copy.archives = root, root / "given"
        copy.env = {**self.env, "ISOEXEC_ARCHIVES": str(copy.archives)}
        return copy
