"""The verdict from the evidence, and what is printed."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from isoexec.cli import main
from isoexec.contract import CASES, ExecutionContract, Numerics
from isoexec.contract.architectures import ENGINE, TRAINER, regions
from isoexec.runtimes.vllm import cache_size
from isoexec.verify.audit import run
from isoexec.verify.audit.report import CLEAN, INCONCLUSIVE, STRAY, STRAY_COLUMNS, evidence, stray_rows, table
from isoexec.verify.audit.run import BUDGET, engine_shape, tokens

CONTRACT = ExecutionContract("Qwen3ForCausalLM", "cpu")


def side(cases) -> dict:
    """Evidence of a process that called every op that its cases declare."""
    calls = {case: [op for region in regions("Qwen3ForCausalLM", "cpr_wy") for op in region.ops(case)] for case in cases}
    return {
        "cases": {case: {"ops": len(ops), "inside": 9, "outside": [["aten.view.default", "movement", 2]]} for case, ops in calls.items()},
        "served": [[op, case, "module:function", 1] for case, ops in calls.items() for op in ops],
        "strays": [],
    }


def stray(**fields) -> dict:
    return {
        "case": "engine_decode", "layer": 0, "op": "aten.mul.Tensor", "kind": "arithmetic", "dtypes": "bfloat16 -> bfloat16",
        "file": "a.py", "line": 3, "function": "f", "count": 2,
    } | fields  # fmt: skip


def test_clean():
    found = run.judge(CONTRACT, side(ENGINE), side(TRAINER))
    assert (found.status, found.faults, found.voids, list(found.cases)) == (CLEAN, [], [], list(TRAINER + ENGINE))


def test_a_stray_op_decides():
    engine = side(ENGINE) | {"strays": [stray()]}
    assert run.judge(CONTRACT, engine, side(TRAINER)).status == STRAY
    assert run.judge(CONTRACT, engine, side(TRAINER[:1])).status == STRAY


def test_an_op_that_was_not_called_is_a_fault():
    engine = side(ENGINE)
    engine["served"] = [call for call in engine["served"] if call[:2] != ["norm.rms_norm", "engine_decode"]]
    found = run.judge(CONTRACT, engine, side(TRAINER))
    assert found.status == STRAY and found.faults[0].startswith("op norm.rms_norm, case engine_decode: declared")


@pytest.mark.parametrize("case", CASES)
def test_a_case_that_was_not_seen_is_inconclusive(case):
    sides = side(ENGINE), side(TRAINER)
    for one in sides:
        if case in one["cases"]:
            one["cases"][case]["inside"] = 0
    found = run.judge(CONTRACT, *sides)
    assert found.status == INCONCLUSIVE and [void.partition(":")[0] for void in found.voids] == [case]


def test_layers_share_a_row():
    strays = [stray(layer=n, count=n + 1) for n in (0, 1, 2, 5)] + [stray(layer=None), stray(line=4, file="", op="kernel.k")]
    rows = stray_rows("m", {"engine_decode": {"strays": strays}})
    assert [(row[2], *row[-3:]) for row in rows] == [
        ("kernel.k", "2", "(device profile) f", "0"), ("aten.mul.Tensor", "14", "a.py:3 f", "-, 0-2, 5"),
    ]  # fmt: skip
    head, rule, *lines = table(STRAY_COLUMNS, rows).splitlines()
    assert head.split()[:3] == ["model", "case", "op"] and set(rule) == {"-", " "} and len(lines) == 2


def test_evidence_counts_what_ran_in_the_block():
    import torch

    from isoexec.ops import norm
    from isoexec.ops._core import registry

    class Nothing:
        strays, inside, outside = Counter(), Counter({"engine_decode": 3}), Counter({("engine_decode", "aten.view.default", "movement"): 4})

    x = torch.ones(2, 16).bfloat16()
    with registry.executing("engine_decode"):
        norm.rms_norm(x, x[0], 1e-6)
        with evidence(Nothing) as found:
            norm.rms_norm(x, x[0], 1e-6)
    assert found["cases"] == {"engine_decode": {"ops": 1, "inside": 3, "outside": [["aten.view.default", "movement", 4]]}}
    assert found["served"] == [["norm.rms_norm", "engine_decode", "isoexec.ops.norm.reference:rms_norm", 1]]


def test_bad_input(tmp_path, capsys):
    assert main(["audit", "--model", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("isoexec: model ")
    for place in (tmp_path / "nowhere" / "audit.json", tmp_path):
        assert main(["audit", "--json", str(place)]) == 2
        assert f"--json {place}: expected a file in a folder that exists" in capsys.readouterr().err


def test_no_model_may_be_missing_from_the_document(tmp_path):
    file = tmp_path / "audit.json"
    run._write_json(file, {"m": run.judge(CONTRACT, side(ENGINE), side(TRAINER))}, CLEAN)
    document = json.loads(file.read_text())
    assert (document["verdict"], set(document["models"]["m"]["cases"])) == ("clean", set(CASES))


def test_a_step_of_the_audited_engine_holds_a_cache_block():
    """A hybrid's block is as long as its state is large; the dense model's engine and the small hybrid's take steps of 100 tokens."""
    attention = {"num_key_value_heads": 2, "head_dim": 256}
    state = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    hybrid = attention | state | {"layer_types": ["linear_attention", "full_attention"]}
    small = hybrid | {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    large = hybrid | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    assert [engine_shape(config, Numerics())["max_num_batched_tokens"] for config in (attention, small)] == [BUDGET, BUDGET]
    shape = engine_shape({"text_config": large}, Numerics())
    block, _ = cache_size.blocks(large, Numerics(), 32, None, 8, shape["max_model_len"], True)
    assert shape["max_num_batched_tokens"] == block > BUDGET
    prompts, _ = tokens(512, block)
    longest = sorted(map(len, prompts))[-2:]
    assert block < longest[0] < longest[1] < shape["max_model_len"] and prompts[-1][: block + 1] == prompts[-2][: block + 1]
