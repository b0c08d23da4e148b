"""scripts/patches rebase: a series moves to another release and back, or says what does not."""

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from house import MODULE, ROOT, release


def pin(house, version: str) -> None:
    """Do to pins.toml what the report of a rebase says."""
    path = house.root / "third_party" / "pins.toml"
    head, tail = path.read_text().split("[tree.skyrl]")
    digest = hashlib.sha256((house.archives / f"skyrl-{version}.tar.gz").read_bytes()).hexdigest()
    tail = re.sub(r'version = ".*"', f'version = "{version}"', tail, count=1)
    tail = re.sub(r'archive = ".*"', f'archive = "skyrl-{version}.tar.gz"', tail, count=1)
    path.write_text(head + "[tree.skyrl]" + re.sub(r'sha256 = ".*"', f'sha256 = "{digest}"', tail, count=1))


def next_release(house, module: str) -> Path:
    path = house.archives / "skyrl-2.0.tar.gz"
    release(path, "skyrl-2.0", {"pyproject.toml": "# next\n", "skyrl/module.py": module, "skyrl/added.py": "", "skyrl.egg-info/PKG-INFO": ""})
    return path


def series(house) -> dict[str, str]:
    return {path.name: path.read_text() for path in (house.root / "patches" / "skyrl").iterdir()}


def test_there_and_back(house):
    """Lines shift, a file comes and one goes: the series follows, and coming back it is the old one, byte for byte."""
    before = series(house)
    archive = next_release(house, "# a new\n# head\n" + MODULE)
    said = house.tool("patches", "rebase", "skyrl", "2.0", "--archive", archive)
    assert said.count("moved ") >= 2 and series(house) == before  # without --write nothing is written
    house.tool("patches", "rebase", "skyrl", "2.0", "--archive", archive, "--write")
    assert "@@ -7,3 +7,3 @@" in series(house)["add-one.patch"]
    pin(house, "2.0")
    house.build()
    assert (house.tree() / "skyrl/added.py").exists() and "return x + 800" in (house.tree() / "skyrl/module.py").read_text()
    house.tool("patches", "check", "skyrl")
    house.tool("patches", "rebase", "skyrl", "1.0", "--archive", house.archives / "skyrl-1.0.tar.gz", "--write")
    assert series(house) == before


def test_conflict_is_reported_and_can_be_finished_by_hand(house):
    before = series(house)
    archive = next_release(house, MODULE.replace("return x + 8\n", "return x - 8\n"))
    said = house.tool("patches", "rebase", "skyrl", "2.0", "--archive", archive, "--write", ok=False)
    assert "moved      add-one.patch" in said and "CONFLICT  add-two.patch\n              skyrl/module.py" in said
    assert series(house) == before
    folder = house.root / ".cache" / "rebase" / "skyrl-2.0"
    commit = re.search(r"git cherry-pick (\w+)", said)[1]
    identity = {**os.environ, **{f"GIT_{who}_{what}": "a@example.invalid" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}}
    assert subprocess.run(["git", "cherry-pick", commit], cwd=folder, env=identity, capture_output=True).returncode != 0
    (folder / "skyrl/module.py").write_text(MODULE.replace("x + 1\n", "x + 100\n").replace("x + 8\n", "x - 800\n"))
    subprocess.run(["git", "-c", "core.editor=true", "cherry-pick", "--continue"], cwd=folder, env=identity, check=False, capture_output=True)
    subprocess.run("git add -u && git -c core.editor=true cherry-pick --continue", shell=True, cwd=folder, env=identity, check=True, capture_output=True)
    house.tool("patches", "export", "skyrl", "--from", folder)
    assert "-    return x - 8\n+    return x - 800\n" in series(house)["add-two.patch"]


def test_a_removed_file_is_a_conflict(house):
    archive = house.archives / "skyrl-2.0.tar.gz"
    release(archive, "skyrl-2.0", {"pyproject.toml": "# next\n"})
    said = house.tool("patches", "rebase", "skyrl", "2.0", "--archive", archive, ok=False)
    assert said.count("CONFLICT") == 2 and said.count("skyrl/module.py") == 2


def test_what_the_release_already_has_is_said(house):
    archive = next_release(house, MODULE.replace("return x + 1\n", "return x + 100\n"))
    said = house.tool("patches", "rebase", "skyrl", "2.0", "--archive", archive, "--write")
    assert "in release add-one.patch" in said and sorted(series(house)) == ["add-two.patch", "series"]


@pytest.mark.network
def test_the_real_series_to_a_neighbouring_release_and_back(tmp_path):
    """patches/megatron on megatron-core 0.18.1, then from there on 0.18.2 again: byte for byte what it was."""
    import dataclasses

    import pins
    import rebase
    from common import Stop, sha256
    from series import Series

    tree = pins.load().trees["megatron"]
    assert tree.version == "0.18.2", "choose the neighbour of the new pin here"
    try:
        archive, home = rebase.other_release(tree, "0.18.1"), rebase.other_release(tree, tree.version)
    except Stop as stop:
        pytest.skip(f"no package index: {stop}")
    here = Series(ROOT / "patches" / "megatron")
    there, outcomes = rebase.rebase(tree, here, "0.18.1", archive)
    assert [(o.conflicts, o.upstreamed) for o in outcomes] == [((), False)] * len(here.names())
    moved = Series(tmp_path / "megatron")
    moved.write(there.patches())
    neighbour = dataclasses.replace(tree, version="0.18.1", archive=archive.name, sha256=sha256(archive))
    back, _ = rebase.rebase(neighbour, moved, tree.version, home)
    assert [patch.text for patch in back.patches()] == [text for _, text in here.texts()]
