"""What every layout, packing and pass of a trainer must share."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from isoexec.contract import CONTRACT_VARIABLE
from isoexec.ops._core.bits import as_bits
from isoexec.ops.logprob import of_hidden
from isoexec.runtimes.megatron import trainer as runtime
from tests.ops.op_checks import same_bits

PACK = 100


def assert_same(found: list, expected: list):
    """Two lists of ``Score`` with rows."""
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        same_bits(a.logprobs, b.logprobs, f"logprobs of sequence {index}")
        assert a.row_digests == b.row_digests


def score_and_step(contract: str | None, model: str, sequences: list, layout: dict, export: str) -> dict:
    """On one rank: bits of the scores in the three cases, with rows and by tiles of the logits, then one optimizer step by such tiles."""
    os.environ[CONTRACT_VARIABLE] = contract or ""
    trainer = runtime.PolicyTrainer(model, **layout)

    def score(**arguments):
        scores = trainer.logprobs(sequences, temperature=0.7, packing=PACK, with_rows=True, **arguments)
        return [(as_bits(s.logprobs).tolist(), s.row_digests) for s in scores]

    trainer.export_hf(export)
    manifest = trainer.weight_manifest().data() if contract else None
    found = {"manifest": manifest, "score": score(), "forward": score(grad=True), "recompute": score(recompute=True)}
    with mock.patch.object(of_hidden, "LOGIT_BYTES", 1 << 14):
        found["tiles"] = [as_bits(s.logprobs).tolist() for s in trainer.logprobs(sequences, temperature=0.7, packing=PACK)]
        found |= trainer.train_step(sequences, None, 0.7, packing=PACK)
    if contract:
        trainer.weight_manifest()  # refuses copies of a tensor that have learnt apart
    found["gradients"] = {name: gradient.numpy() for name, gradient in trainer.gradients().items()}
    trainer.close()
    return found


def assert_scores(found: dict, expected: dict):
    for case in ("score", "forward", "recompute"):
        assert found[case] == expected["score"], case
    assert found["tiles"] == [bits for bits, _ in expected["score"]]


def assert_gradients_close(found: dict, expected: dict):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        a, b = torch.from_numpy(found[name]), torch.from_numpy(gradient)
        assert (a - b).norm() < 0.03 * b.norm(), f"{name}: {(a - b).norm() / b.norm():.4f}"


def assert_layout(ranks: list[dict], one: dict, model: str, exported: str, norm_tolerance: float = 2e-3):
    """What :func:`score_and_step` found on every rank is what ``one`` process found, and ``exported`` is the checkpoint again."""
    if not ranks[0]["score"]:  # a pipeline stage before the last has no logits
        ranks = ranks[1:]
    for found in ranks:
        assert found["manifest"] == one["manifest"], "the same weights have one manifest, in any layout and on every rank"
        assert_scores(found, one)
        assert found["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert found["grad_norm"] == pytest.approx(one["grad_norm"], rel=norm_tolerance)
        assert_gradients_close(found["gradients"], one["gradients"])
    stored, back = (load_file(os.path.join(folder, "model.safetensors")) for folder in (model, exported))
    assert stored.keys() == back.keys()
    for name, tensor in stored.items():
        same_bits(back[name], tensor, name)
