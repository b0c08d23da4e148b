"""scripts/python finds Python 3.12 where it is, and says what is missing where it is not."""

import os
import subprocess
import sys

from house import ROOT

FINDER = ROOT / "scripts" / "python"


def find(env: dict[str, str], *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["/bin/bash", FINDER, *(words or ["--which"])], env=env, text=True, capture_output=True, stdin=subprocess.DEVNULL)


def fake(path, version: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\ncase \"$1\" in -V) echo Python {version}.0;; *) echo {version};; esac\n")
    path.chmod(0o755)


def test_a_version_manager_folder_off_path(tmp_path):
    fake(tmp_path / "versions" / "3.12.9" / "bin" / "python3.12", "3.12")
    found = find({"PATH": "/nowhere", "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path)})
    assert found.stdout.strip() == str(tmp_path / "versions/3.12.9/bin/python3.12"), found.stderr


def test_uv_folder(tmp_path):
    fake(tmp_path / "cpython-3.12.9-linux-x86_64-gnu" / "bin" / "python3.12", "3.12")
    found = find({"PATH": "/nowhere", "HOME": str(tmp_path), "UV_PYTHON_INSTALL_DIR": str(tmp_path)})
    assert found.stdout.strip().endswith("cpython-3.12.9-linux-x86_64-gnu/bin/python3.12"), found.stderr


def test_on_path_where_no_usual_place_has_it(tmp_path):
    fake(tmp_path / "bin" / "python3", "3.12")
    usual = [f"{folder}/python3.12" for folder in ("/opt/python/cp312-cp312/bin", "/usr/local/bin", "/usr/bin")]
    usual = [path for path in usual if os.path.exists(path)]
    found = find({"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)})
    assert found.stdout.strip() == (usual or [str(tmp_path / "bin" / "python3")])[0], found.stderr


def test_wrong_python_is_one_message(tmp_path):
    fake(tmp_path / "bin" / "python3", "3.11")
    found = find({**os.environ, "ISOEXEC_PYTHON": str(tmp_path / "bin" / "python3")})
    assert found.returncode == 1 and found.stdout == ""
    assert "expected: Python 3.12 at ISOEXEC_PYTHON" in found.stderr and "do: " in found.stderr


def test_a_shim_that_runs_nothing_is_passed_over(tmp_path):
    shim = tmp_path / "versions" / "3.12.0" / "bin" / "python3.12"
    shim.parent.mkdir(parents=True)
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    fake(tmp_path / "versions" / "3.12.9" / "bin" / "python3.12", "3.12")
    found = find({"PATH": "/nowhere", "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path)})
    assert "3.12.9" in found.stdout


def test_it_runs_what_it_is_given():
    found = find({**os.environ, "ISOEXEC_PYTHON": sys.executable}, "-c", "import sys; print(sys.version_info[:2])")
    assert found.stdout.strip() == "(3, 12)"
