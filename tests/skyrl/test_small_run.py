"""Real SkyRL over real Ray: vLLM samples, Megatron trains, and no bit differs. Two runs, each in a process of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from isoexec.runtimes.skyrl.steps import read_steps

pytestmark = pytest.mark.skipif(
    not os.environ.get("ISOEXEC_TEST_TRAINING"),
    reason="starts Ray, vLLM and Megatron twice, which a busy machine may be too slow for; ISOEXEC_TEST_TRAINING=1 runs it",
)

HERE = Path(__file__).parent
STEPS = 3
CHECKPOINTS = ("trainer.ckpt_interval=1", "trainer.resume_mode=latest")


def run(model: Path, out: Path, *overrides: str) -> subprocess.CompletedProcess:
    """``small_run.py`` to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("ISOEXEC_CONTRACT", None)
    return subprocess.run(
        [sys.executable, "small_run.py", str(model), str(out), *overrides],
        cwd=HERE, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    for package in ("ray", "skyrl", "vllm"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; run `make build`")
    from isoexec.verify.checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Folder of a run from start to end."""
    out = tmp_path_factory.mktemp("whole")
    ended = run(model, out, *CHECKPOINTS)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def resumed(model, whole, tmp_path_factory):
    """Folder of a run that finds the checkpoint of the first step, as one that was killed after it would."""
    out = tmp_path_factory.mktemp("resumed")
    shutil.copytree(whole / "checkpoints/global_step_1", out / "checkpoints/global_step_1")
    (out / "checkpoints/latest_ckpt_global_step.txt").write_text("1")
    (out / "checkpoints/.global_step_2.partial").mkdir()  # what a kill within a save leaves
    (out / "steps.jsonl").write_text((whole / "steps.jsonl").read_text().splitlines()[0] + '\n{"step": 2, "half')
    ended = run(model, out, *CHECKPOINTS)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return out


def digests(checkpoint: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in checkpoint.rglob("*") if file.is_file()}


def numbers(line: dict) -> dict:
    """A step's line without its times."""
    return {name: value for name, value in line.items() if name != "seconds"}


def test_no_token_differs_at_any_step(whole):
    lines = read_steps(whole / "steps.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert [line[f"rollout_train_logprobs_abs_diff_{moment}"] for moment in ("mean", "max", "std")] == [0.0, 0.0, 0.0]
        assert line["bit_equal"] == 1.0 and line["tokens"] > 4 * 4 * 4
        assert line["first_minibatch_ratio_min"] == line["first_minibatch_ratio_max"] == 1.0
        assert line["first_minibatch_clip_fraction"] == 0.0
        assert {"generate", "train", "sync", "step"} <= line["seconds"].keys()
    assert not list(whole.glob("mismatch-*"))


def test_the_policy_trains(whole):
    lines = read_steps(whole / "steps.jsonl")
    assert all(line["grad_norm"] > 0 and 0 < line["reward"] < 1 for line in lines)
    first, last = (digests(whole / f"checkpoints/global_step_{n}/policy") for n in (1, STEPS))
    assert first.keys() == last.keys() and all(first[name] != last[name] for name in first)


def test_a_resumed_run_is_bitwise_the_run_it_continues(whole, resumed):
    ours, theirs = (list(map(numbers, read_steps(out / "steps.jsonl"))) for out in (whole, resumed))
    assert ours == theirs
    assert digests(whole / f"checkpoints/global_step_{STEPS}") == digests(resumed / f"checkpoints/global_step_{STEPS}")
    assert not list((resumed / "checkpoints").glob(".*partial"))


def test_nothing_in_a_checkpoint_is_pickled(whole):
    assert {file.suffix for file in (whole / "checkpoints").rglob("*") if file.is_file()} == {".safetensors", ".json", ".txt"}


def test_no_process_is_left(whole, resumed):
    left = [
        entry
        for entry in Path("/proc").glob("[0-9]*/environ")
        if str(whole).encode() in _environment(entry) or str(resumed).encode() in _environment(entry)
    ]
    assert not left, [(entry.parent / "cmdline").read_text() for entry in left]


def _environment(entry: Path) -> bytes:
    try:
        return entry.read_bytes()
    except OSError:
        return b""
