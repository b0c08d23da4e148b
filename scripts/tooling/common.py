"""What every build tool shares: where things are, how a tool stops, how it runs a command."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Commits in the build trees are a function of their content alone: same archive and series, same commit ids.
AUTHOR = "IsoExec <isoexec@example.invalid>"
_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "IsoExec"), ("EMAIL", "isoexec@example.invalid"), ("DATE", "2000-01-01T00:00:00+0000"))
}
# The user's git configuration (signing, hooks, diff settings, autocrlf) must not change a commit or a patch.
_GIT_ENV = {**_IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
_GIT_REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")

FULL = (errno.ENOSPC, errno.EDQUOT)


class Stop(Exception):
    """The tool cannot go on. Says what was expected, what was found and what to do next."""

    def __init__(self, what: str, *, expected: str = "", found: str = "", do: str = ""):
        lines = [what]
        for label, text in (("expected", expected), ("found", found), ("do", do)):
            if text:
                lines.append(f"  {label + ':':<10}" + text.strip().replace("\n", "\n" + " " * 12))
        super().__init__("\n".join(lines))


def main(function) -> None:
    """Run a tool's entry point; a Stop, a full disk or a Ctrl-C ends it with one message."""
    try:
        sys.exit(function(sys.argv[1:]))
    except Stop as stop:
        sys.exit(f"error: {stop}")
    except OSError as error:
        if error.errno in FULL:
            sys.exit(f"error: {disk_full(error)}")
        sys.exit(f"error: {error.strerror or error}: {error.filename or 'a file'}")
    except KeyboardInterrupt:
        sys.exit("interrupted: run it again to go on from here")


def says_disk_full(output: str) -> bool:
    """Whether what a command said names a full disk, or a used-up quota, as the cause."""
    return any(words in output for words in (*map(os.strerror, FULL), "Out of diskspace"))  # the last is git's own


def disk_full(detail: object) -> Stop:
    import shutil

    free = shutil.disk_usage(ROOT).free / 2**30
    return Stop(
        "the disk is full",
        expected="about 9 GiB for a backend: the environment 6, trees and archives 2, downloads 1",
        found=f"{free:.1f} GiB free at {ROOT} ({detail})",
        do="free some space and run it again: finished steps are kept",
    )


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None, check: bool = True,
        stdin: str | None = None) -> subprocess.CompletedProcess:
    """Run a command and keep its output; if `check`, a failure is a Stop that shows the output's end."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **(env or {})}, text=True, input=stdin,
                          stdin=subprocess.DEVNULL if stdin is None else None,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="surrogateescape")
    if check and done.returncode != 0:
        output = (done.stdout + done.stderr).strip()
        if says_disk_full(output):
            raise disk_full(words[0])
        raise Stop(f"command failed: {' '.join(words)}", expected="exit status 0",
                   found=f"exit status {done.returncode}\n" + "\n".join(output.splitlines()[-25:]),
                   do="mend the cause above and run it again")
    return done


def git(tree: Path, *arguments: object, check: bool = True, stdin: str | None = None) -> subprocess.CompletedProcess:
    """Run git in `tree`, with our identity and nobody's configuration."""
    for variable in _GIT_REPOSITORY_VARIABLES:  # set when a hook calls us
        os.environ.pop(variable, None)
    options = ("-c", "core.autocrlf=false", "-c", "core.hooksPath=" + os.devnull, "-c", "gc.auto=0", "-c", "safe.directory=*")
    return run("git", *options, *arguments, cwd=tree, env=_GIT_ENV, check=check, stdin=stdin)


def git_out(tree: Path, *arguments: object) -> str:
    return git(tree, *arguments).stdout.strip()


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8", errors="surrogateescape")
    scratch.replace(path)
