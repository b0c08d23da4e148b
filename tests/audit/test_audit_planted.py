"""Stray ops planted in models, runtimes and upstream code are found in an engine and a trainer, with case, layer, file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from triton import knobs
from triton.compiler.compiler import LazyDict

from isoexec.contract.architectures import ENGINE, TRAINER
from isoexec.models import qwen3
from isoexec.ops._core import registry

mlp_block = qwen3.mlp_block


def multiplied(x, *arguments, **options):
    return mlp_block(x * 1.0, *arguments, **options)  # multiply


def cast(x, *arguments, **options):
    return mlp_block(x.float().bfloat16(), *arguments, **options)  # cast


def native(x, gate_up, down, *rest, **options):
    h = F.linear(x, gate_up)  # linear
    gate, up = h.chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)  # activation and second linear


def on_bits(x, *arguments, **options):
    return mlp_block((x.view(torch.int16) ^ 0).view(torch.bfloat16), *arguments, **options)  # bits


def kernel(x, *arguments, **options):
    """No GPU runs it here: what its launcher calls first, with the metadata that Triton gives it."""
    launched = LazyDict({"name": "stray_kernel", "function": 0, "stream": 0})
    knobs.runtime.launch_enter_hook(launched)  # kernel
    return mlp_block(x, *arguments, **options)


#: name -> (replacement of the MLP, {line: ops})
IN_LAYERS = {
    "multiply": (multiplied, {"multiply": {"aten.mul.Tensor"}}),
    "cast": (cast, {"cast": {"aten.to.dtype", "aten._to_copy.default"}}),
    "linear": (
        native,
        {
            "linear": {"aten.mm.default"},
            "activation and second linear": {"aten.silu.default", "aten.mul.Tensor", "aten.mm.default"},
        },
    ),
    "bits": (on_bits, {"bits": {"aten.view.dtype"}}),
    "kernel": (kernel, {"kernel": {"triton.stray_kernel"}}),
}


def line_of(mark: str) -> int:
    [number] = [n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {mark}")]
    return number


def here(found) -> list[dict]:
    """Strays, all of them from this file."""
    assert {Path(stray["file"]).name for stray in found["strays"]} <= {Path(__file__).name}
    return found["strays"]


def assert_in_layers(found, cases, expected):
    strays = here(found)
    assert {(s["case"], s["layer"]) for s in strays} == {(case, layer) for case in cases for layer in (0, 1)}
    assert {s["line"] for s in strays} == {line_of(mark) for mark in expected}
    for mark, ops in expected.items():
        assert {s["op"] for s in strays if s["line"] == line_of(mark)} <= ops
    assert all(s["count"] > 0 for s in strays)


def assert_outside_layers(found, cases, mark, op):
    assert {(s["case"], s["layer"], s["line"], s["op"]) for s in here(found)} == {(case, None, line_of(mark), op) for case in cases}


class TestEngine:
    def test_unplanted(self, audit_engine):
        found = audit_engine()
        assert found["strays"] == []
        assert set(found["cases"]) == set(ENGINE) and all(case["ops"] and case["inside"] for case in found["cases"].values())

    @pytest.mark.parametrize("name", IN_LAYERS)
    def test_in_a_layer(self, audit_engine, monkeypatch, name):
        replacement, expected = IN_LAYERS[name]
        monkeypatch.setattr(qwen3, "mlp_block", replacement)
        assert_in_layers(audit_engine(), ENGINE, expected)

    def test_in_upstreams_logits_processor(self, audit_engine, monkeypatch):
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        forward = LogitsProcessor.forward
        monkeypatch.setattr(LogitsProcessor, "forward", lambda *a, **k: forward(*a, **k) * 1.0)  # logits
        assert_outside_layers(audit_engine(), ENGINE, "logits", "aten.mul.Tensor")

    def test_after_the_log_softmax(self, audit_engine, monkeypatch):
        from isoexec.runtimes.vllm import sampler

        sample = sampler.sample

        def changed(*arguments):
            drawn, logprobs = sample(*arguments)
            return drawn, logprobs + 0.0  # logprobs

        monkeypatch.setattr(sampler, "sample", changed)
        assert_outside_layers(audit_engine(), ENGINE, "logprobs", "aten.add.Tensor")


class TestTrainer:
    def test_unplanted(self, audit_trainer):
        found = audit_trainer()
        assert found["strays"] == []
        assert set(found["cases"]) == set(TRAINER) and all(case["ops"] and case["inside"] for case in found["cases"].values())

    def test_where_logprobs_alone_are_wanted(self, audit_trainer, monkeypatch):
        """A trainer's own path makes no logits of a whole batch, but tiles of them."""
        from isoexec.ops.logprob import of_hidden

        monkeypatch.setattr(of_hidden, "LOGIT_BYTES", 1 << 14)
        assert audit_trainer()["strays"] == []
        rows = of_hidden._rows
        monkeypatch.setattr(of_hidden, "_rows", lambda *arguments: rows(*arguments) * 1.0)  # tiles
        assert_outside_layers(audit_trainer(), TRAINER, "tiles", "aten.mul.Tensor")

    @pytest.mark.parametrize("name", [name for name in IN_LAYERS if name != "bits"])  # which have no gradient
    def test_in_a_layer(self, audit_trainer, monkeypatch, name):
        replacement, expected = IN_LAYERS[name]
        monkeypatch.setattr(qwen3, "mlp_block", replacement)
        assert_in_layers(audit_trainer(), TRAINER, expected)

    def test_in_recomputation_alone(self, audit_trainer, monkeypatch):
        def sometimes(x, *arguments, **options):
            again = registry.current_case() == "trainer_recompute"
            return mlp_block(x * 1.0 if again else x, *arguments, **options)  # recompute

        monkeypatch.setattr(qwen3, "mlp_block", sometimes)
        assert_in_layers(audit_trainer(), ("trainer_recompute",), {"recompute": {"aten.mul.Tensor"}})

    def test_in_upstreams_embedding(self, audit_trainer, monkeypatch):
        from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

        forward = LanguageModelEmbedding.forward
        monkeypatch.setattr(LanguageModelEmbedding, "forward", lambda *a, **k: forward(*a, **k) * 1.0)  # embedding
        # Recomputation runs the first pass too, as a trainer's forward; embeddings are not recomputed.
        assert_outside_layers(audit_trainer(), ("trainer_score", "trainer_forward"), "embedding", "aten.mul.Tensor")

    def test_after_the_logprob(self, audit_trainer, monkeypatch):
        from isoexec.runtimes.megatron import trainer

        by_sequence = trainer._by_sequence

        def changed(batches, scored):
            return by_sequence(batches, [(logprobs + 0.0, rows) for logprobs, rows in scored])  # scores

        monkeypatch.setattr(trainer, "_by_sequence", changed)
        assert_outside_layers(audit_trainer(), TRAINER, "scores", "aten.add.Tensor")
