"""No floating-point op strays in a trainer of two ranks either: collectives between ranks are ops, or move bytes."""

from __future__ import annotations

import functools

import pytest
from ranks import on_ranks

from isoexec.contract.architectures import TRAINER
from isoexec.models import qwen3
from isoexec.verify.audit.trainer_worker import TrainerAudit

#: name -> (architecture, arguments of the trainer)
LAYOUTS = {
    "dense tp2": ("Qwen3ForCausalLM", {"tensor_parallel": 2}),
    "dense pp2": ("Qwen3ForCausalLM", {"pipeline_parallel": 2}),
    "hybrid MoE tp2-sp-ep2": ("Qwen3_5MoeForCausalLM", {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
}
SEQUENCES = [([5, 6, 7], [8, 9]), (list(range(3, 73)), [11]), ([4], [12, 13, 14])]


def audited(model: str, contract: str, layout: dict, planted: bool) -> dict:
    """On one rank: the evidence of an audit of the three cases."""
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    if planted:
        mlp_block = qwen3.mlp_block
        qwen3.mlp_block = lambda x, *arguments, **options: mlp_block(x * 1.0, *arguments, **options)
    audit = TrainerAudit(functools.partial(PolicyTrainer, **layout))
    audit.open(model, contract, 0.01 if "expert_parallel" in layout else 0.0)
    found = audit.audit(SEQUENCES, [[0, 1], [2]])
    audit.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_op_strays(checkpoint_of, layout):
    architecture, arguments = LAYOUTS[layout]
    for found in on_ranks(2, audited, *checkpoint_of(architecture), arguments, False):
        assert found["strays"] == []
        assert set(found["cases"]) == set(TRAINER) and all(case["inside"] for case in found["cases"].values())


def test_a_planted_op_is_found_on_every_rank(checkpoint_of):
    architecture, arguments = LAYOUTS["dense tp2"]
    for found in on_ranks(2, audited, *checkpoint_of(architecture), arguments, True):
        assert {(s["case"], s["op"], s["layer"]) for s in found["strays"]} == {
            (case, "aten.mul.Tensor", layer) for case in TRAINER for layer in (0, 1)
        }
