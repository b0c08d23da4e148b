"""make build: does each step once, goes on after a kill, and touches only what a change touches."""

import subprocess
import sys

import pytest


def test_second_run_does_nothing(house):
    house.build()
    assert "nothing to do" in house.build()


@pytest.mark.parametrize(
    "where",
    ["vendor.fill", "install.create_environment", "build.initialise", "build.apply_series", "trees._apply", "install.install_editable"],
)
def test_a_killed_run_is_finished_by_the_next(empty_house, built_house, where):
    """SIGKILL at the start of any step: no lock, half tree or stamp stays that stops or misleads the next run."""
    patches = built_house.root / "patches"
    subprocess.run(["cp", "-r", patches, empty_house.root], check=True)
    empty_house.build(ok=False, kill_at=where)
    empty_house.build()
    assert "nothing to do" in empty_house.build()
    assert empty_house.git("log", "--format=%s").split("\n")[:3] == ["Add two", "Add one", "upstream"]
    assert empty_house.git("status", "--porcelain") == ""


def test_killed_inside_git_am(house):
    """What git itself leaves behind when it is killed: its lock, its state, a half-written file."""
    git = house.tree() / ".git"
    house.git("reset", "-q", "--hard", "upstream")
    (git / "isoexec-applying").touch()
    (git / "rebase-apply").mkdir()
    (house.tree() / "skyrl/module.py").write_text("half")
    (git / "index.lock").touch()
    assert "2 applied anew" in house.tool("patches", "apply", "skyrl")
    assert house.git("status", "--porcelain") == ""


def test_a_changed_patch_touches_its_tree_alone(house):
    house.build()
    path = house.patch("add-two.patch")
    path.write_text(path.read_text().replace("800", "900"))
    said = house.build()
    assert "==> patches-skyrl" in said and "1 applied anew" in said
    assert said.count("==>") == 1  # no other tree, no installation: the install is editable


def test_a_patch_of_the_install_recipe_installs_again(house):
    house.build()
    (house.tree() / "pyproject.toml").write_text("# changed\n")
    house.git("commit", "-qam", "Change recipe\n\nWhy.\n\nOps: norm\nUpstream-status: sent\nDrop-when: never")
    house.tool("patches", "export", "skyrl")
    said = house.build()
    assert "==> install-skyrl" in said and "==> install-vllm" not in said


def test_a_changed_lock_installs_all_again_and_applies_nothing(house):
    house.build()
    (house.root / "requirements" / "stack.txt").write_text("torch==2.11.1 --hash=sha256:0\n")
    said = house.build()
    assert all(f"==> {step}" in said for step in ("environment", "install-vllm", "install-skyrl", "install-isoexec"))
    assert "==> tree-" not in said and "==> patches-" not in said


def test_a_comment_in_the_lock_changes_nothing(house):
    house.build()
    path = house.root / "requirements" / "stack.txt"
    path.write_text("# a comment\n" + path.read_text())
    assert "nothing to do" in house.build()


def test_a_removed_tree_comes_back(house):
    house.build()
    subprocess.run(["rm", "-rf", house.tree()], check=True)
    house.build()
    assert house.git("status", "--porcelain") == "" and "Add two" in house.git("log", "--format=%s")


def test_a_tree_with_work_in_it_is_not_replaced(house):
    house.build()
    house.commit("Add three", "return x + 3\n", "return x + 300\n")
    pins = house.root / "third_party" / "pins.toml"
    pins.write_text(pins.read_text().replace('generated = ["skyrl.egg-info"]', 'generated = ["skyrl.egg-info", "a.md"]'))
    said = house.build(ok=False)
    assert "must be made anew and holds work" in said and "Add three" in said
    house.tool("patches", "export", "skyrl")
    house.build()
    assert "Add three" in house.git("log", "--format=%s") and "a.md" not in house.git("ls-files")


def test_work_in_a_tree_does_not_stop_a_build_that_need_not_touch_it(house):
    house.build()
    house.commit("Add three", "return x + 3\n", "return x + 300\n")
    assert "nothing to do" in house.build()


def test_clean_refuses_to_drop_work(house):
    house.commit("Add three", "return x + 3\n", "return x + 300\n")
    assert "Add three" in house.tool("build", "--clean", ok=False) and house.tree().exists()
    house.tool("patches", "export", "skyrl")
    house.tool("build", "--clean")
    assert not (house.root / "build").exists()


def test_extensions_of_the_wheel_land_in_the_tree_and_are_no_edit(house):
    house.build()
    assert (house.tree("vllm") / "vllm" / "_C.so").read_text() == "binary"
    assert house.git("status", "--porcelain", tree="vllm") == ""


def test_two_builds_at_once_are_refused(house):
    hold = f"import fcntl, sys; f = open({str(house.root / 'build/cpu/.lock')!r}, 'w'); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert "another build" in house.build(ok=False)
    finally:
        holder.communicate("")
    house.build()
