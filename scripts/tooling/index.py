"""The package index, reached through uv alone: no registry is named in this repository.

uv knows which index this machine uses (its own settings, or pip's, handed over here). It resolves pinned
names to a lock file with addresses and hashes (PEP 751); the files are then fetched from there.
"""

from __future__ import annotations

import base64
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from common import FULL, ROOT, Stop, disk_full, run, sha256

_UV_AT_LEAST = (0, 7)  # `uv pip compile --format pylock.toml`


def _works(uv: str) -> bool:
    # A version manager's shim may be on PATH and yet run nothing.
    try:
        done = subprocess.run([uv, "--version"], capture_output=True, text=True, timeout=30)
        return done.returncode == 0 and tuple(int(n) for n in done.stdout.split()[1].split(".")[:2]) >= _UV_AT_LEAST
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return False


def find_uv() -> str:
    """Path of a working uv; installed by pip into .cache/uv if the machine has none."""
    own = ROOT / ".cache" / "uv" / "bin" / "uv"
    for candidate in (os.environ.get("ISOEXEC_UV"), shutil.which("uv"), str(own)):
        if candidate and _works(candidate):
            return candidate
    print("uv: none on this machine, installing it with pip into .cache/uv", flush=True)
    requirements = ROOT / "requirements" / "uv.txt"
    wheels = bundled_wheels()
    offline = ("--no-index", "--find-links", wheels) if wheels else ()
    try:
        run(sys.executable, "-m", "venv", "--clear", own.parents[1])
        run(own.with_name("python"), "-m", "pip", "install", "-q", "--require-hashes", *offline, "-r", requirements)
    except Stop as stop:
        raise Stop("uv is not there and pip could not install it", expected=f"the version in {requirements.relative_to(ROOT)}, by pip",
                   found=str(stop), do="install uv (>= 0.7) by hand so that it is on PATH, or set ISOEXEC_UV to it") from stop
    return str(own)


def bundled_wheels() -> Path | None:
    """The folder of dependency wheels in an offline bundle (`make bundle`), if ISOEXEC_ARCHIVES is one."""
    folder = os.environ.get("ISOEXEC_ARCHIVES")
    wheels = Path(folder, "wheels") if folder else None
    return wheels if wheels and wheels.is_dir() else None


def environment() -> dict[str, str]:
    """Settings that make uv use the index and certificates this machine's pip uses. uv's own settings win."""
    settings = {"UV_HTTP_TIMEOUT": os.environ.get("UV_HTTP_TIMEOUT", "300"), "UV_NO_PROGRESS": "1" if not sys.stderr.isatty() else "0"}
    if not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & os.environ.keys():
        address = os.environ.get("PIP_INDEX_URL") or run(sys.executable, "-m", "pip", "config", "get", "global.index-url", check=False).stdout.strip()
        if address:
            settings["UV_DEFAULT_INDEX"] = address
    if "SSL_CERT_FILE" not in os.environ and os.environ.get("PIP_CERT"):
        settings["SSL_CERT_FILE"] = os.environ["PIP_CERT"]
    return settings


def resolve(requirements: list[str]) -> dict[str, tuple[str, str]]:
    """File name -> (address, sha256) of every file the index has for the pinned `requirements` (no dependencies)."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted, lock = Path(scratch, "wanted.in"), Path(scratch, "pylock.toml")
        wanted.write_text("\n".join(requirements) + "\n")
        done = run(find_uv(), "pip", "compile", "--no-deps", "--no-header", "--python-version", "3.12", "--format", "pylock.toml",
                   wanted, "-o", lock, env=environment(), check=False)
        if done.returncode != 0:
            raise Stop("the package index could not be asked", expected="files of " + ", ".join(requirements), found=done.stderr.strip()[-1500:],
                       do="check the network and the index settings of pip or uv (PIP_INDEX_URL, UV_DEFAULT_INDEX),\n"
                          "or set ISOEXEC_ARCHIVES to a folder that holds the files named in third_party/pins.toml")
        found = {}
        for package in tomllib.loads(lock.read_text())["packages"]:
            for file in [*package.get("wheels", []), *filter(None, [package.get("sdist")])]:
                name = file.get("name") or urllib.parse.unquote(file["url"].split("#")[0].rsplit("/", 1)[-1])
                found[name] = (file["url"], file["hashes"]["sha256"])
        return found


def _open(address: str, offset: int):
    parts = urllib.parse.urlsplit(address)
    headers = {"User-Agent": "isoexec-build", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    if parts.username:  # urllib does not take credentials from an address
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(secret.encode()).decode()
        address = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    certificates = os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT")
    context = ssl.create_default_context(cafile=certificates) if certificates and Path(certificates).is_file() else None
    return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60, context=context)


def fetch(address: str, target: Path, digest: str) -> None:
    """Download to `target`, going on where an earlier try stopped; only a file with the right sha256 gets that name."""
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 5):
        try:
            _fetch_rest(address, part)
            break
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:  # the part is already whole, or longer
                break
            if attempt == 4:
                raise Stop(f"download of {target.name} failed", expected="the whole file", found=f"{error} after {part.stat().st_size if part.exists() else 0} bytes",
                           do="check the network and run it again (it goes on from there), or put the file into ISOEXEC_ARCHIVES") from error
            time.sleep(2 * attempt)
        except OSError as error:
            if error.errno in FULL:
                raise disk_full(error) from error
            raise
    found = sha256(part)
    if found != digest:
        part.unlink()
        raise Stop(f"wrong content: {target.name}", expected=f"sha256 {digest}", found=f"sha256 {found} (removed)",
                   do="run it again; if it stays, the index serves another file than third_party/pins.toml names: do not use it")
    part.replace(target)


def _fetch_rest(address: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    with _open(address, have) as answer:
        if have and answer.status != 206:  # the server starts over
            have = 0
        total = have + int(answer.headers.get("Content-Length", 0))
        shown = time.monotonic()
        with open(part, "ab" if have else "wb") as file:
            while block := answer.read(1 << 20):
                file.write(block)
                have += len(block)
                if time.monotonic() - shown > 5:
                    shown = time.monotonic()
                    print(f"    {part.stem}: {have >> 20} of {total >> 20} MiB", flush=True)
        if total and have < total:
            raise ConnectionError(f"connection closed at {have} of {total} bytes")
