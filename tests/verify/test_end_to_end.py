"""The real command on the real engines, reduced in size: vLLM and Megatron, with the contract and without."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The command's result and the folder it wrote."""
    from isoexec.verify.checkpoint import make_checkpoint

    out = tmp_path_factory.mktemp("verify")
    model = make_checkpoint(tmp_path_factory.mktemp("model") / "Qwen3ForCausalLM")  # of the architectures that the command runs by itself
    environment = {k: v for k, v in os.environ.items() if k != "ISOEXEC_CONTRACT"}
    command = [sys.executable, "-m", "isoexec.cli", "verify", "--model", str(model), "--prompts", "16", "--tokens", "24", "--out", str(out)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500), out


@pytest.fixture(scope="module")
def document(finished):
    result, out = finished
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return json.loads((out / "verify.json").read_text())


def runs(document, arm):
    return [run for run in document["runs"] if run["arm"] == arm]


def test_every_isoexec_token_and_row_is_equal(document):
    ours = runs(document, "isoexec")
    assert len(ours) == 13
    for run in ours:
        assert (run["bit_equal"], run["rows_equal"]) == (1.0, 1.0), run["setting"]
        assert (run["mean_abs"], run["max_abs"], run["std_abs"]) == (0.0, 0.0, 0.0), run["setting"]


def test_the_native_arm_differs_in_every_setting(document):
    """Else the same comparison would say "equal" of anything."""
    native = runs(document, "native")
    settings = [{run["setting"].split(" / ")[0] for run in side} for side in (native, runs(document, "isoexec"))]
    assert settings[0] == settings[1] and len(native) == len(settings[0])
    assert all(run["bit_equal"] < 1 and run["max_abs"] > 1e-4 for run in native)


def test_settings_happened(document):
    [model] = document["models"].values()
    for arm in ("native", "isoexec"):
        evidence = model["evidence"][arm]
        assert evidence["preempted"]["preemptions"] > 0
        assert evidence["chunked prefill"]["chunked_prompts"] > 0
        assert evidence["prefix cache, cold"]["cached_tokens"] < evidence["prefix cache, warm"]["cached_tokens"]
        assert evidence["after sync"]["changed_logprobs"] > 8


def test_one_planted_ulp_is_seen(document):
    [model] = document["models"].values()
    assert model["control"]["bit_equal"] < 0.5 and model["control"]["rows_equal"] < 0.5


def test_isoexec_is_as_accurate_as_native(document):
    [model] = document["models"].values()
    errors = model["mean_abs_error_to_hf_fp32"]
    assert errors["tokens"] > 16 * 24 and 0 < errors["isoexec"] <= 1.1 * errors["native"]


def test_what_the_user_sees(finished, document):
    result, out = finished
    assert "together / score" in result.stdout and "tokens have the same bits on both sides" in result.stdout
    assert (out / "verify.png").stat().st_size > 10_000
    assert {p.name for p in (out / "logs").iterdir()} == {
        "reference.log", "engine-native.log", "engine-isoexec.log", "trainer-native.log", "trainer-isoexec.log"
    }  # fmt: skip


def test_a_hybrid_in_the_shortest_run(tmp_path):
    """As few tokens as the command takes: every setting still happens, with states of Gated DeltaNet in the cache; the form of checkpoint and
    of the core that no other run of both engines has, and an engine of two ranks beside a trainer of one."""
    from isoexec.verify.checkpoint import make_checkpoint

    name = "Qwen3_5ForConditionalGeneration"
    model = make_checkpoint(tmp_path / name, name, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    command = [sys.executable, "-m", "isoexec.cli", "verify", "--model", str(model), "--prompts", "16", "--tokens", "8"]
    command += ["--gdn-form", "cpr", "--gdn-chunk", "64", "--engine-tp", "2", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    document = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert all((run["bit_equal"], run["rows_equal"], run["max_abs"]) == (1.0, 1.0, 0.0) for run in runs(document, "isoexec"))
    [model] = document["models"].values()
    assert model["evidence"]["isoexec"]["preempted"]["preemptions"] >= 8
    assert {"engine-native", "engine-isoexec-0", "engine-isoexec-1"} <= set(document["seconds"])


def test_the_self_test_ends_with_1(tmp_path):
    """`--plant-ulp`: the trainer's weights are off by one ulp, so the run must not pass."""
    from isoexec.verify.checkpoint import make_checkpoint

    model = make_checkpoint(tmp_path / "Qwen3ForCausalLM", num_hidden_layers=2)
    command = [sys.executable, "-m", "isoexec.cli", "verify", "--model", str(model), "--plant-ulp", "--prompts", "16", "--tokens", "8"]
    result = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=600)
    assert result.returncode == 1, result.stdout[-4000:] + result.stderr[-4000:]
    assert "DIFFERENT" in result.stdout and "planted: one ulp" in result.stdout + result.stderr
    [run] = json.loads((tmp_path / "out" / "verify.json").read_text())["runs"]
    assert run["arm"] == "isoexec" and run["bit_equal"] < 0.5 and run["max_abs"] > 0


def test_bad_input_is_one_line(tmp_path):
    for folder, text in ((tmp_path / "absent", "no such folder"), (tmp_path, "config.json is missing")):
        command = [sys.executable, "-m", "isoexec.cli", "verify", "--model", str(folder), "--out", str(tmp_path / "out")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 2
        assert text in result.stderr and len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()
