"""The environment holds what the lock names, byte for byte, or nothing is installed: real uv, tiny wheels, no network."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

import house  # noqa: F401  (puts the tools on the path)
import common
import index
import install
from common import Stop

NOWHERE = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}


def wheel(folder: Path, project: str, content: str = "") -> str:
    """Write project-1.0-py3-none-any.whl, one module of that name; returns the line of a lock that allows it alone."""
    info = f"{project}-1.0.dist-info"
    path = folder / f"{project}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{project}/__init__.py", content)
        packed.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{info}/RECORD", f"{project}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return f"{project}==1.0 \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def bundle(tmp_path, monkeypatch) -> Path:
    """An offline bundle of `setuptools` and `tiny`, a lock of both, and no index to fall back on."""
    wheels = tmp_path / "given" / "wheels"
    wheels.mkdir(parents=True)
    lock = tmp_path / "requirements" / "stack.txt"
    lock.parent.mkdir()
    lock.write_text(wheel(wheels, "setuptools") + wheel(wheels, "tiny"))
    monkeypatch.setattr(install, "LOCK", lock)
    monkeypatch.setattr(install, "ROOT", tmp_path)
    for name, value in {**NOWHERE, "ISOEXEC_ARCHIVES": str(wheels.parent), "UV_CACHE_DIR": str(tmp_path / "cache"), "UV_LINK_MODE": "copy"}.items():
        monkeypatch.setenv(name, value)
    return wheels


@pytest.fixture
def venv(tmp_path) -> Path:
    return tmp_path / "venv"


def packages(venv: Path) -> Path:
    return venv / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"


def create(venv: Path) -> None:
    install.create_environment(index.find_uv(), venv)


def test_an_offline_bundle_serves_and_what_the_lock_does_not_name_goes(bundle, venv):
    create(venv)
    assert (packages(venv) / "tiny").is_dir() and (packages(venv) / "setuptools").is_dir()
    lock = install.LOCK.read_text()
    install.LOCK.write_text(lock[: lock.index("tiny")])
    create(venv)
    assert not (packages(venv) / "tiny").exists() and (packages(venv) / "setuptools").is_dir()


def test_what_is_installed_is_compiled_once(bundle, venv, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # whoever sets it pays at every start for what is not
    create(venv)
    assert [file.suffix for file in (packages(venv) / "tiny" / "__pycache__").iterdir()] == [".pyc"]


def test_a_wheel_of_another_hash_is_not_installed(bundle, venv):
    """Same name and version, one line more: refused, and the locked one is taken when it is back."""
    good = (bundle / "tiny-1.0-py3-none-any.whl").read_bytes()
    other = wheel(bundle, "tiny", "another = True\n").split("sha256:")[1].strip()
    locked = hashlib.sha256(good).hexdigest()
    with pytest.raises(Stop) as stop:
        create(venv)
    said = str(stop.value)
    assert "the environment could not be installed" in said and locked in said and other in said and "do not use that index" in said
    assert not (packages(venv) / "tiny").exists()
    (bundle / "tiny-1.0-py3-none-any.whl").write_bytes(good)
    create(venv)
    assert (packages(venv) / "tiny" / "__init__.py").read_text() == ""


def test_a_lock_without_hashes_is_refused(bundle, venv):
    install.LOCK.write_text("tiny==1.0\n")
    with pytest.raises(Stop, match="hashes included"):
        create(venv)
    assert not (packages(venv) / "tiny").exists()


def test_no_network_is_one_message_and_the_next_run_finishes(bundle, venv, monkeypatch):
    archives = os.environ["ISOEXEC_ARCHIVES"]
    monkeypatch.delenv("ISOEXEC_ARCHIVES")
    with pytest.raises(Stop) as stop:
        create(venv)
    said = str(stop.value)
    assert "the environment could not be installed" in said and "check the index settings" in said and "make bundle" in said
    monkeypatch.setenv("ISOEXEC_ARCHIVES", archives)
    create(venv)
    assert (packages(venv) / "tiny").is_dir()


def test_an_environment_whose_python_is_gone_is_made_anew(bundle, venv):
    create(venv)
    python = venv / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3.12")
    create(venv)
    install.confirm(venv, "tiny", "tiny", "1.0", packages(venv) / "tiny")


def test_confirm_refuses_what_is_not_there_as_it_should_be(bundle, venv):
    create(venv)
    place = packages(venv) / "tiny"
    install.confirm(venv, "tiny", "tiny", "1.0", place)
    for project, module, version, path in (
        ("tiny", "tiny", "1.1", place),  # another version
        ("tiny", "tiny", "1.0", venv / "tiny"),  # from elsewhere
        ("tiny", "absent", "1.0", place),
        ("tiny", "absent.below", "1.0", place),
        ("absent", "tiny", "1.0", place),
    ):
        with pytest.raises(Stop, match=f"{project} is not installed as it should be") as stop:
            install.confirm(venv, project, module, version, path)
        assert f"{version} from {path}" in str(stop.value) and "make build" in str(stop.value)


def program(path: Path, body: str) -> list[str]:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return [str(path)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_from_other_failures(bundle, tmp_path, capsys, number):
    """uv's and git's words for it, whichever tool runs them."""
    full = program(tmp_path / "full", f"echo 'Resolved 2 packages'; echo 'error: {os.strerror(number)} (os error {number})' >&2; exit 2")
    other = program(tmp_path / "other", "echo 'error: no such thing' >&2; exit 2")
    with pytest.raises(Stop, match="the disk is full"):
        install._show_progress(full, {}, "")
    assert capsys.readouterr().out == "    Resolved 2 packages\n"
    with pytest.raises(Stop, match="the disk is full"):
        common.run(*full)
    with pytest.raises(Stop, match="the environment could not be installed(.|\n)*no such thing(.|\n)*ask"):
        install._show_progress(other, {}, "ask")
    with pytest.raises(Stop, match="command failed(.|\n)*no such thing"):
        common.run(*other)


def test_a_tool_ends_with_one_message():
    """main: a Stop, a full disk, a file or program that cannot be had and Ctrl-C are messages; a fault of the tool is not hidden."""

    def ended(error: BaseException):
        def tool(arguments):
            raise error

        with pytest.raises(SystemExit) as end:
            common.main(tool)
        return end.value.code

    assert ended(Stop("what", expected="this", do="that")) == "error: what\n  expected: this\n  do:       that"
    assert ended(OSError(errno.ENOSPC, "full")).startswith("error: the disk is full\n")
    assert ended(OSError(errno.EDQUOT, "quota")).startswith("error: the disk is full\n")
    assert ended(KeyboardInterrupt()) == "interrupted: run it again to go on from here"
    assert ended(FileNotFoundError(errno.ENOENT, "No such file or directory", "git")) == "error: No such file or directory: git"
    with pytest.raises(LookupError):
        ended(LookupError("planted"))
