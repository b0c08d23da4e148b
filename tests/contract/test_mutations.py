"""Every entry of a real identity, changed on one side: refused by name, or, for what moves no bit, accepted and logged."""

import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import isoexec
from isoexec.contract import ContractError, ExecutionContract, Identity, Numerics, differences, handshake, sha256_hex
from isoexec.contract.identity import PARTS
from isoexec.runtimes import compose, evidence

CONTRACT = compose.composed(
    ExecutionContract("Qwen3_5MoeForCausalLM", "cpu", model=sha256_hex("a model"), deployment=(("max_num_seqs", "64"), ("page_size", "32")))
)


@functools.lru_cache(maxsize=None)
def ours():
    return evidence.identity(CONTRACT, "trainer")


def leaves(value, path=()):
    """Paths of everything that is not an object or a list, and of empty ones."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if not items:
        yield path
    for key, item in items:
        yield from leaves(item, (*path, key))


def other(value):
    """Another value of the same type, as near as can be."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        last = value[-1:] or "a"
        return value[:-1] + ("1" if last == "0" else "0" if last.isdigit() else "a" if last != "a" else "b")
    return "something"


def mutated(path):
    data = json.loads(ours().to_json())
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = other(at[path[-1]])
    return Identity.from_json(json.dumps({**data, "role": "engine"}))


LEAVES = [path for path in leaves(json.loads(ours().to_json())) if path[0] != "role"]


def test_there_is_enough_to_change():
    assert len([p for p in LEAVES if p[0] == "numerical_policy"]) > 60 and len([p for p in LEAVES if p[0] == "deployment"]) >= 3


@pytest.mark.parametrize("part", ("semantic", "numerical_policy", "deployment"))
def test_every_entry(part):
    checked, before = 0, ours().digests
    for path in (p for p in LEAVES if p[0] == part):
        theirs = mutated(path)
        after = theirs.digests
        assert {name for name in PARTS if before[name] != after[name]} == {part}, path
        if part == "deployment":
            assert [d.path for d in handshake(ours(), theirs)] == [".".join(path)]
        else:
            with pytest.raises(ContractError) as error:
                handshake(ours(), theirs)
            named = str(error.value).partition(":")[0]
            for step in (step for step in path[1:] if isinstance(step, str)):
                assert step in named or step in ("region", "cases"), (path, str(error.value))
            assert "trainer has" in str(error.value) and "engine has" in str(error.value)
        checked += 1
    assert checked == len([p for p in LEAVES if p[0] == part]) > 0


@pytest.mark.parametrize("path", [("numerical_policy", "packages", "torch"), ("numerical_policy", "ops", "matmul.linear")])
def test_an_entry_that_one_side_lacks(path):
    data = json.loads(ours().to_json())
    del data[path[0]][path[1]][path[2]]
    with pytest.raises(ContractError, match=f"{'.'.join(path)}: trainer has .*, engine has absent"):
        handshake(ours(), Identity.from_json(json.dumps(data | {"role": "engine"})))


def test_equal_identities_shake_hands():
    assert handshake(ours(), Identity.from_json(ours().to_json())) == []
    data = json.loads(ours().to_json())
    data["numerical_policy"]["contract"]["composition"].reverse()
    assert handshake(ours(), Identity.from_json(json.dumps(data))) == []


def process_identities(package, role, *steps):
    """Identities of another process that imports ``package`` (a folder named isoexec), one for each step."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("identity_process.py")
    done = subprocess.run([sys.executable, script, role, *steps], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [Identity.from_json(line) for line in done.stdout.splitlines()]


def test_live_processes(tmp_path):
    """A trainer's process, and an engine's that is first like it, then changes its math mode, its chunk size, a byte of kernel source.

    In its installation one line of the patched Megatron and the version of a package can differ, too.
    """
    package = tmp_path / "isoexec"
    shutil.copytree(Path(isoexec.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    file, other_chunk = tmp_path / "contract.json", tmp_path / "other.json"
    file.write_text(CONTRACT.to_json())
    other_chunk.write_text(dataclasses.replace(CONTRACT, composition=(), numerics=Numerics(gdn_chunk=32)).to_json())
    (trainer,) = process_identities(package, "trainer", file)
    same, high, chunk, _, edited = process_identities(package, "engine", file, "high", other_chunk, file, "edit")
    assert handshake(trainer, same) == []
    core = importlib.util.find_spec("megatron.core")
    if core is not None:  # in the environment that `make build` makes
        shutil.copytree(core.submodule_search_locations[0], tmp_path / "megatron" / "core", ignore=shutil.ignore_patterns("__pycache__"))
        with open(tmp_path / "megatron" / "core" / "utils.py", "a") as source:
            source.write("\n")
    info = tmp_path / "safetensors-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.99.0\n")
    [installed] = process_identities(package, "engine", file)
    packages = {"packages.safetensors"} | ({"packages.megatron-core"} if core else set())
    assert {d.path for d in differences(trainer.numerical_policy, installed.numerical_policy) if "packages" in d.path} == packages
    for engine, message in (
        (installed, "numerical_policy.ops.norm.*; install the same isoexec|numerical_policy.packages.* engine has .*; install the versions"),
        (high, 'math.float32_matmul_precision: trainer has "highest", engine has "high"; leave torch'),
        (chunk, "numerical_policy.contract.composition.*same ISOEXEC_CONTRACT"),
        (edited, "numerical_policy.ops.norm.* engine has .*; install the same isoexec"),
    ):
        with pytest.raises(ContractError, match=message):
            handshake(trainer, engine)
