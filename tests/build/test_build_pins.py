"""The pins, the submodules and the lock say the same thing."""

import re
import subprocess

import pytest

import pins
from house import ROOT
from series import Series


@pytest.mark.parametrize("name", ["vllm", "megatron", "skyrl"])
def test_gitlink_is_the_pinned_commit(name):
    listed = subprocess.run(["git", "ls-files", "-s", f"third_party/{name}"], cwd=ROOT, text=True, capture_output=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    assert listed.stdout == f"160000 {pins.load().trees[name].commit} 0\tthird_party/{name}\n"
    assert f'path = third_party/{name}\n' in (ROOT / ".gitmodules").read_text()


def test_wheels_and_tree_are_one_release():
    loaded = pins.load()
    assert {wheel.version for wheel in loaded.wheels.values()} == {loaded.trees["vllm"].version}


@pytest.mark.parametrize("name", ["stack", "uv"])
def test_lock_pins_every_package_with_hashes(name):
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
    packages = [line for line in lines if re.match(r"[a-z0-9]", line)]
    assert packages and all(re.match(r"[a-z0-9._-]+(\[.*\])?==\S+ .*--hash=sha256:[0-9a-f]{64}", line) for line in packages)


def test_lock_holds_the_releases_that_fit_together():
    text = (ROOT / "requirements" / "stack.txt").read_text()
    for pin in ("torch==2.11.0", "triton==3.6.0", "torchvision==0.26.0", "ray==2.56.0", "hydra-core==1.3.2", "skyrl-gym==0.4.0", "vllm-router==0.1.14"):
        assert re.search(rf"^{re.escape(pin)} ", text, re.M), pin


@pytest.mark.parametrize("name", ["vllm", "megatron", "skyrl"])
def test_patches_are_of_this_project(name):
    """Every header is whole (`make patches-check` proves the rest, from the archives)."""
    for file, patch in Series.of(name).patches():
        assert patch.faults() == [] and patch.file_name == file
