"""make build: does each step once, goes on after a kill, and touches only what a change touches."""

import os
import resource
import shutil
import subprocess
import sys
import time

import pytest

from house import ROOT


def test_second_run_does_nothing(house):
    house.build()
    assert "nothing to do" in house.build()


@pytest.mark.parametrize("says, backend", [("GPU 0: NVIDIA H200", "cuda"), ("No devices were found", "cpu")])
def test_the_backend_is_the_machines(empty_house, tmp_path, says, backend):
    """Unless one is named: what the driver's tool lists decides, and where there is a driver without it, that there is one."""
    if backend == "cpu" and os.path.exists("/proc/driver/nvidia/gpus"):
        pytest.skip("this machine has a GPU")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "{says}"\n')
    tool.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert empty_house.tool("build", "--which", env=path) == f"{backend}\n"
    other = {"cuda": "cpu", "cpu": "cuda"}[backend]
    assert empty_house.tool("build", "--backend", other, "--which", env=path) == f"{other}\n"


def test_a_long_step_says_that_it_goes_on(monkeypatch, capsys):
    import build  # of scripts/tooling, which house.py puts on the path

    monkeypatch.setattr(build, "QUIET", 0.05)
    said, start = "", time.monotonic()
    with build.still_running(start):
        while said.count("still running") < 2 and time.monotonic() < start + 60:
            time.sleep(0.05)
            said += capsys.readouterr().out
    assert said.count("still running") >= 2
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().out == "", "it has ended"


STEPS = ("vendor.fill", "install.create_environment", "build.initialise", "build.apply_series", "trees._apply", "install.install_editable")


def finished(house, patches) -> None:
    """The next run finishes what one before it did not: no lock, half tree or stamp stops or misleads it."""
    house.build()
    assert "nothing to do" in house.build()
    assert house.git("log", "--format=%s").split("\n")[:3] == ["Add two", "Add one", "upstream"]
    for tree in ("vllm", "megatron", "skyrl"):
        assert house.git("status", "--porcelain", tree=tree) == ""
        assert house.git("rev-parse", "upstream", tree=tree) == house.git("rev-list", "--max-parents=0", "HEAD", tree=tree)
        assert (house.root / "third_party" / tree / tree / "module.py").exists()
    assert (house.root / "patches" / "skyrl" / "add-two.patch").read_text() == (patches / "skyrl" / "add-two.patch").read_text()


@pytest.fixture
def unbuilt(empty_house, built_house):
    """Not built, with the two patches."""
    shutil.copytree(built_house.root / "patches", empty_house.root / "patches")
    return empty_house


@pytest.mark.parametrize("where", STEPS)
def test_a_killed_run_is_finished_by_the_next(unbuilt, built_house, where):
    """SIGKILL at the start of any step."""
    unbuilt.build(ok=False, kill_at=where)
    finished(unbuilt, built_house.root / "patches")


@pytest.mark.parametrize("where", ["Path.rmdir", "trees.git:1", "trees.git:3", "trees.git:4"])
def test_a_run_killed_inside_a_step_is_finished_by_the_next(unbuilt, built_house, where):
    """Between the removal of a source folder and its new one; after `git init`, the commit and the tag of a release."""
    unbuilt.build(ok=False, kill_after=where)
    finished(unbuilt, built_house.root / "patches")


@pytest.mark.parametrize("where", STEPS)
def test_a_full_disk_is_one_message_and_the_next_run_finishes(unbuilt, built_house, where):
    said = unbuilt.build(ok=False, fail_at=where)
    assert "error: the disk is full" in said and "run it again: finished steps are kept" in said
    finished(unbuilt, built_house.root / "patches")


@pytest.mark.parametrize("how", ["killed", "full"])
def test_interrupted_inside_git_am(house, tmp_path, how):
    """What git leaves behind when it is killed or cannot write: its lock, its state, half-written files, one of them new."""
    (house.tree() / "skyrl" / "new.py").write_text("new\n")
    house.git("add", "skyrl/new.py")
    house.git("commit", "-qm", "Add new\n\nWhy.\n\nOps: norm\nUpstream-status: sent\nDrop-when: never")
    house.tool("patches", "export", "skyrl")
    house.git("reset", "-q", "--hard", "upstream")
    leaves = f"cd {house.tree()} && mkdir .git/rebase-apply && touch .git/index.lock && echo half | tee skyrl/new.py >skyrl/module.py"
    if how == "killed":
        (house.tree() / ".git" / "isoexec-applying").touch()
        subprocess.run(leaves, shell=True, check=True)
    else:
        git = tmp_path / "bin" / "git"
        git.parent.mkdir()
        git.write_text(f'#!/bin/sh\ncase "$*" in *" am "*) {leaves}; echo "error: skyrl/module.py: No space left on device" >&2; exit 128;; esac\n'
                       f'exec {shutil.which("git")} "$@"\n')
        git.chmod(0o755)
        said = house.tool("patches", "apply", "skyrl", env={"PATH": f"{git.parent}:{os.environ['PATH']}"}, ok=False)
        assert "the disk is full" in said and "skyrl/add-one.patch" in said and "does not apply" not in said
    assert "3 applied anew" in house.tool("patches", "apply", "skyrl")
    assert house.git("status", "--porcelain") == "" and (house.tree() / "skyrl" / "new.py").read_text() == "new\n"


def test_a_full_file_system_while_patches_apply(house, tmp_path):
    """Not imitated: the tree lies in a file system without a free block, and then has some again."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system of his own")
    (house.tree() / "skyrl" / "large.txt").write_text("a line\n" * 20_000)
    house.git("add", "skyrl/large.txt")
    house.git("commit", "-qm", "Add large\n\nWhy.\n\nOps: norm\nUpstream-status: sent\nDrop-when: never")
    house.tool("patches", "export", "skyrl")
    house.git("reset", "-q", "--hard", "upstream")
    script = f"""
mkdir {tmp_path}/small && mount -t tmpfs -o size=16m none {tmp_path}/small && cp -a {house.root} {tmp_path}/small/house && cd {tmp_path}/small/house || exit 9
(cat /dev/zero >filler) 2>/dev/null
truncate -s -65536 filler
scripts/patches apply skyrl && exit 8
rm filler
scripts/patches apply skyrl && git -C build/cpu/skyrl status --porcelain && wc -l build/cpu/skyrl/skyrl/large.txt
"""
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], env=house.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    first, _, second = done.stdout.partition("run it again: finished steps are kept\n")
    assert done.returncode == 0 and "the disk is full" in first and "does not apply" not in first, done.stdout
    assert second.startswith("skyrl: 3 patches, ") and second.splitlines()[1:] == ["20000 build/cpu/skyrl/skyrl/large.txt"], done.stdout


def test_edits_after_an_interrupted_run_are_work_again(house):
    """The mark of an interrupted run lasts until what that run left is cleared, not longer."""
    house.commit("Add three", "return x + 3\n", "return x + 300\n")
    (house.tree() / ".git" / "isoexec-applying").touch()
    assert "Add three" in house.tool("patches", "apply", "skyrl", ok=False)
    (house.tree() / "skyrl/module.py").write_text("edited")
    house.tool("patches", "apply", "skyrl", ok=False)
    assert (house.tree() / "skyrl/module.py").read_text() == "edited"


def test_emptied_source_folders_are_filled_again(house):
    house.build()
    house.tool("vendor", "empty")
    said = house.build()
    assert "==> third_party" in said and said.count("==>") == 1
    assert (house.root / "third_party/skyrl/skyrl/module.py").exists()


def test_a_build_with_nothing_to_do_needs_no_archive(house):
    house.build()
    shutil.rmtree(house.archives)
    del house.env["ISOEXEC_ARCHIVES"]
    house.env |= {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
    assert "nothing to do" in house.build()


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_real_build_again_takes_seconds(backend):
    """Nothing faked: this repository, where it is built, without the archives it was built from."""
    if not (ROOT / "build" / backend / ".stamps" / "install-isoexec").exists():
        pytest.skip(f"this repository has no finished build for {backend}")
    env = {name: value for name, value in os.environ.items() if name != "ISOEXEC_ARCHIVES"}
    for run in range(2):  # the first may find a change to make
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([ROOT / "scripts" / "build", "--backend", backend], env=env, text=True, capture_output=True)
        took, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stdout + done.stderr
        if f"build/{backend}: nothing to do" in done.stdout:
            break
    assert f"build/{backend}: nothing to do" in done.stdout, done.stdout
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    busy = os.getloadavg()[0] > os.cpu_count()  # then a time says how long it waited for its turn
    assert computed < 2 and (took < 5 or busy), (took, computed, done.stdout)


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
