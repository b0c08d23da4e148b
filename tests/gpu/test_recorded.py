"""The runs of this folder recorded on a GPU (gpu_results.json) prove what the code routes and pins now; a record of other code fails."""

import json
import operator
import re
from pathlib import Path

import pytest

from isoexec.contract import CASES
from isoexec.ops._core import provider
from isoexec.ops._core.provider import PROVIDERS
from isoexec.ops.attention import fa3
from tests.gpu import compile_everywhere, record, sanitize, sources

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "gpu_results.json").read_text())
TRAINED = json.loads((HERE / "training_results.json").read_text())
#: Kernels whose warps have roles of their own, their files, and what their warps hand each other behind an arrival of one thread.
WARP_ROLES = {
    "tree_product_kernel": ("matmul/hopper.py", "handed._reinterpret("),
    "paired_keys_kernel": ("attention/hopper.py", None),
    "chain_kernel": ("attention/hopper_decode.py", None),
}
PASSED = [name for run in RECORDED["runs"] for name in run["passed"]]


def test_nothing_failed():
    assert len(PASSED) == len(set(PASSED)) > 200 and not any(run["other"] or run["unfinished"] for run in RECORDED["runs"])


def test_the_runs_are_of_this_code():
    recorded = {}
    for run in RECORDED["runs"]:
        assert not recorded.keys() & run["sources"].keys(), "a file is of one run"
        recorded |= run["sources"]
    now = sources.digests()
    other = sorted(name for name in recorded.keys() | now.keys() if recorded.get(name) != now.get(name))
    assert not other, f"gpu_results.json is a record of other kernels than {', '.join(other)}: run python -m tests.gpu.record COMMIT on a GPU"


@pytest.mark.parametrize("name,run", json.loads((HERE / "verify_results.json").read_text()).items())
def test_no_bit_differed_in_a_verification(name, run):
    ours, theirs = ([r for r in run["runs"] if r["arm"] == arm] for arm in ("isoexec", "native"))
    assert run["status"] == 0 and len(ours) == 13 and sum(r["tokens"] for r in ours) == 1600
    assert {(r["bit_equal"], r["rows_equal"], r["max_abs"]) for r in ours} == {(1.0, 1.0, 0.0)}
    before = [r for r in theirs if not r["setting"].startswith("after sync")]  # trained on one batch it is sure of its tokens
    assert bool(before) == ("upstream" in name) and all(r["bit_equal"] == 0 < 0.03 < r["mean_abs"] for r in before)
    for model in run["models"].values():
        assert model["control"]["bit_equal"] < 0.05 < model["control"]["max_abs"], "one ulp in one weight shows in nearly every token"
        happened = model["evidence"]["isoexec"]
        assert happened["preempted"]["preemptions"] and happened["chunked prefill"]["chunked_prompts"]
        assert happened["prefix cache, warm"]["cached_tokens"] > happened["prefix cache, cold"]["cached_tokens"]
        replays = [setting.get("replays", 0) for setting in happened.values()]
        assert all(replays) if name.endswith("captured") else not any(replays)
        assert model["contract"]["handshakes"] == 4 and len({entry["version"] for entry in model["contract"]["weights"]}) == 2


@pytest.mark.parametrize("name,run", json.loads((HERE / "audit_results.json").read_text()).items())
def test_no_op_strayed(name, run):
    cases = run["models"][name]["cases"]
    assert run["verdict"] == "clean" and cases.keys() == set(CASES)
    assert all(case["inside"] > 400 and not case["strays"] for case in cases.values())


def test_captured_steps_of_a_hybrid_are_traced_to_the_weight_that_differs():
    found = json.loads((HERE / "trace_results.json").read_text())
    same, planted = found["same"], found["one ulp of a weight"]
    assert same["verdict"] == "identical" and same["compared"]["rows"] > 40_000 and ["engine_decode", "trainer_score"] in same["compared"]["cases"]
    assert [case["tokens"] for case in same["logprobs"].values()] == [case["equal"] for case in same["logprobs"].values()] == [42, 6]
    assert (planted["verdict"], planted["class"], planted["inputs_differ"], planted["element"]["ulps"]) == ("divergent", "weights", False, 1)
    first = planted["first"]
    assert (first["layer"], first["stage"], first["cases"]["engine"]) == (0, "norm.zero_centered_rms_norm", "engine_decode")


@pytest.mark.parametrize("way", ["captured", "eager", "hybrid"])
def test_no_bit_differed_in_training(way):
    run = TRAINED[way]
    assert [step["weight_version"] for step in run["steps"]] == [1, 2, 3] and len({sync["version"] for sync in run["syncs"]}) == 4
    for step in run["steps"]:
        assert [step[f"rollout_train_logprobs_abs_diff_{moment}"] for moment in ("mean", "max", "std")] == [0.0, 0.0, 0.0]
        assert [step[f"first_minibatch{kind}_ratio_{end}"] for kind in ("", "_rollout") for end in ("min", "max")] == [1.0] * 4
        assert step["bit_equal"] == 1.0 and step["tokens"] > 300 and step["grad_norm"] > 0
    replayed = [sync["replayed"] for sync in run["syncs"]]  # as many as before the sync
    assert replayed[0] == 0 and all(map(operator.eq if way == "eager" else operator.lt, replayed, replayed[1:]))


def test_captured_steps_train_the_same_policy():
    """Rollouts, losses, gradients and weights of both runs: a replay has the bits of the step that it captured."""
    captured, eager = TRAINED["captured"], TRAINED["eager"]
    assert [sync["version"] for sync in captured["syncs"]] == [sync["version"] for sync in eager["syncs"]]
    for ours, theirs in zip(captured["steps"], eager["steps"], strict=True):
        assert {name: value for name, value in ours.items() if name != "seconds"} == {
            name: value for name, value in theirs.items() if name != "seconds"
        }


def test_without_a_contract_rollout_and_trainer_differ():
    for step in TRAINED["native"]["steps"]:
        assert step["bit_equal"] < 0.05 and step["rollout_train_logprobs_abs_diff_mean"] > 5e-3 and step["tokens"] > 300
        assert step["first_minibatch_rollout_ratio_min"] < 0.97 and 1.02 < step["first_minibatch_rollout_ratio_max"]


@pytest.mark.parametrize("way", ["captured", "eager", "hybrid"])
def test_comparing_the_weights_is_less_than_a_fiftieth_of_a_sync(way):
    run = TRAINED[way]
    for step, sync in list(zip(run["steps"], run["syncs"][1:]))[1:]:  # the first ones compile
        assert sync["seconds"]["flush"] + sync["seconds"]["comparison"] < step["seconds"]["sync"] / 50


def test_a_change_of_code_shows_and_a_comment_does_not():
    source = (sources.OPS / "norm" / "triton.py").read_text()
    assert sources.of(source + "# a comment\n") == sources.of(source)
    assert sources.of(source.replace("_GRADIENT_PROGRAMS = 132", "_GRADIENT_PROGRAMS = 131")) != sources.of(source)


def test_what_composes_ops_and_what_kernels_import_is_of_the_record():
    """Modules that are no kernel's and still compute on a GPU; a declaration, or a check, computes nothing."""
    found = sources.digests().keys()
    assert {"logprob/of_hidden.py", "moe/parallel.py", "collective/reference.py", "_core/triton_math.py", "attention/hopper.py"} <= found
    assert not any(name.startswith(("gdn/", "_trace/")) or name.endswith(("__init__.py", "checks.py")) for name in found)


@pytest.mark.parametrize("command", [compile_everywhere, provider, record, sanitize], ids=lambda module: module.__name__)
def test_help_is_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        command.parse(["--help"])
    assert end.value.code == 0 and f"python -m {command.__name__}" in capsys.readouterr().out


def test_the_pinned_providers_are_the_proven_ones():
    assert RECORDED["providers"] == {p.name: p.sha256 for p in PROVIDERS.values()}, "run the gates on a GPU with these providers"


def test_every_launch_compiles_for_the_other_architectures():
    found = json.loads((HERE / "compiled.json").read_text())
    assert found["sources"] == sources.digests(), "run python -m tests.gpu.compile_everywhere, which needs no GPU"
    assert not any(found["failed"].values()) and not any(found["missing"].values())
    assert set(found["compiled"]) == {"sm_80", "sm_89", "sm_100"} and all(len(cases) > 60 for cases in found["compiled"].values())


def test_every_head_size_given_to_a_provider_passed_its_gates():
    for gate in ("test_every_case_has_the_same_bits", "test_pages_of_every_size", "test_context_of_131072"):
        gates = [name for name in PASSED if name.startswith(f"test_attention::{gate}[public-")]
        proven = {int(name.rstrip("]").rsplit("-", 1)[1]) for name in gates}
        assert set(fa3.HEAD_SIZES) <= proven, gate


def test_the_sanitizer_s_record():
    """Every launch of this code, no error but what docs/gpu.md explains."""
    found = json.loads((HERE / "sanitized.json").read_text())
    assert not found["failed"] and len(found["launches"]) == len(set(found["launches"])) >= 60
    assert found["sources"] == sources.digests(), "run python -m tests.gpu.sanitize on a GPU"
    assert {tool["tool"]: tool["errors"] == 0 for tool in found["tools"]} == {"memcheck": True, "racecheck": False, "synccheck": True}
    (races,) = (tool for tool in found["tools"] if tool["tool"] == "racecheck")
    accesses = re.findall(r"access at (\w+)\+\S+ in (\S+\.py):(\d+)", races["summary"])
    # Which pairs it reports differs from run to run; every access of every pair is here.
    assert races["errors"] == races["summary"].count("Race reported between ") and len(accesses) == races["summary"].count("access at ")
    assert all(explained(*access) for access in accesses), accesses
    assert {kernel for kernel, _, _ in accesses} == set(WARP_ROLES)
    kernel, file, line = accesses[0]  # negative controls: another line, another kernel
    assert not explained(kernel, file, str(int(line) + 1)) and not explained("another_kernel", file, line)


def explained(kernel: str, file: str, line: str) -> bool:
    """Whether an access lies where a kernel's warps get their roles and arguments, at its entry or where they part, or at what they hand each other.

    That these are ordered is shown of the compiled kernels (test_compile.py).
    """
    if kernel not in WARP_ROLES or not WARP_ROLES[kernel][0].endswith(f"/{file}"):
        return False
    path, handed = WARP_ROLES[kernel]
    text, following = (text.strip() for text in (sources.OPS / path).read_text().splitlines()[int(line) - 1 : int(line) + 1])
    part = "gl.warp_specialize("
    return text.startswith((f"def {kernel}(", part)) or (text.startswith("if ") and following.startswith(part)) or (handed is not None and handed in text)
