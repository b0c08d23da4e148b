"""Every planted fault is found: the right op, layer, token and class. And what holds no fault is identical."""

from __future__ import annotations

import faults
import latent_faults
import planting
import pytest
from faults import FAULTS
from planting import Fault

from isoexec.verify.trace.compare import Divergence, Misfit
from isoexec.verify.trace.report import as_json, lines


def test_without_a_fault_the_sides_are_identical(pair):
    rollouts, engine = pair.clean()
    scores, trainer = pair.score(rollouts)
    found = pair.report(rollouts, scores, engine, trainer)
    assert found.verdict == "identical", lines(found)
    assert found.compared.pairs == {("engine_prefill", "trainer_score"), ("engine_decode", "trainer_score")}
    tokens = sum(len(prompt) + len(r["tokens"]) - 1 for prompt, r in zip(pair.prompts, rollouts))
    assert len(found.compared.tokens) == tokens  # the last sampled token is never computed by the engine
    assert found.compared.stages > 90 and not found.notes
    assert sorted(found.compared.heat) == [faults.EMBEDDING, 0, 1, 2, 3, faults.HEAD]


def test_every_pass_of_the_trainer_is_identical(pair):
    rollouts, engine = pair.clean()
    scores, trainer = pair.score(rollouts, grad=True, recompute=True)
    found = pair.report(rollouts, scores, engine, trainer)
    assert found.verdict == "identical", lines(found)
    assert {theirs for _, theirs in found.compared.pairs} == {"trainer_forward", "trainer_recompute"}


def test_sequences_can_be_chosen(pair):
    rollouts, engine = pair.clean()
    scores, trainer = pair.score(rollouts, sequences=[1, 4], level="layers")
    found = pair.report(rollouts, scores, engine, trainer)
    assert found.verdict == "identical", lines(found)
    assert {sequence for sequence, _ in found.compared.tokens} == {1, 4}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(pair, name):
    found_as_planted(pair, name, FAULTS[name])


def found_as_planted(pair, name, fault):
    rollouts, engine = pair.clean() if fault.side == "trainer" else pair.sample(name)
    planted = name if fault.side == "trainer" else None
    scores, trainer = pair.score(rollouts, planted, **fault.score)
    found = pair.report(rollouts, scores, engine, trainer)
    assert found.verdict == "divergent" and found.status == 1
    check(found, fault, pair)


def check(found, fault: Fault, pair) -> None:
    told = "\n".join(lines(found))
    assert found.finding.kind == fault.kind, told
    assert fault.said in " ".join(found.finding.why), told
    first = found.compared.first
    if isinstance(first, Misfit):
        stages = [stage[0] for stage in (first.ours, first.theirs) if stage]
        assert first.layer == fault.layer and any(stage.startswith(fault.stage) for stage in stages), told
        return
    assert (first.where.layer, first.where.stage) == (fault.layer, fault.stage), told
    sequence = found.sequences[first.sequence]
    may = fault.token or planting.first_token
    assert may(first.sequence, first.position, sequence.prompt, sequence.tokens), told
    assert as_json(found)["first"]["layer"] == fault.layer


ELEMENTS = {
    "one ulp in a norm": ("out", 1),
    "logits rounded to bf16": ("out", None),
    "a value that is not a number": ("out", None),
    "a sign that is lost": ("out", None),
    "another temperature": ("temperature", None),
    "flipped ties of the router": ("experts", None),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_the_first_element_is_named(pair, name):
    """A second pass keeps the rows of the token that differs first."""
    fault, (field, ulps) = FAULTS[name], ELEMENTS[name]
    on_engine, on_trainer = (name if fault.side == side else None for side in ("engine", "trainer"))
    rollouts, engine = pair.sample(on_engine)
    engine = engine.rename(pair.work / "first.zip")
    scores, trainer = pair.score(rollouts, on_trainer, **fault.score)
    trainer = trainer.rename(pair.work / "second.zip")
    first = pair.report(rollouts, scores, engine, trainer).compared.first
    assert isinstance(first, Divergence)
    wanted = dict(level="ops", sequences=[first.sequence], wanted=[[*first.where, first.sequence, first.position]])
    again, rows = pair.sample(on_engine, **wanted)
    assert [r["tokens"] for r in again] == [r["tokens"] for r in rollouts]
    _, other_rows = pair.score(rollouts, on_trainer, **fault.score, **wanted)
    found = pair.report(rollouts, scores, engine, trainer, (rows, other_rows))
    element = found.finding.element
    told = "\n".join(lines(found))
    assert element.field == field and element.bits[0] != element.bits[1] and element.differing >= 1, told
    if ulps is not None:
        assert element.ulps is not None and element.ulps >= ulps, told
    if name == "another temperature":
        assert element.values == ("0.699999988079071", "1.0") and element.of == 1
    if name == "a sign that is lost":
        assert element.index[-1] == 0 and float(element.values[0]) == -float(element.values[1])
    if name == "a value that is not a number":
        assert "nan" in element.values and element.index == (0, 0)


def test_what_was_planted_is_gone(pair):
    """The last test of the model: the sides are identical again."""
    rollouts, engine = pair.sample()
    scores, trainer = pair.score(rollouts)
    assert pair.report(rollouts, scores, engine, trainer).verdict == "identical"


def test_latent_attention_is_identical_in_every_pass(latent):
    rollouts, engine = latent.clean()
    for passes in ({}, {"grad": True, "recompute": True}):
        scores, trainer = latent.score(rollouts, **passes)
        found = latent.report(rollouts, scores, engine, trainer)
        assert found.verdict == "identical" and not found.notes, lines(found)
        assert found.compared.stages > 70 and sorted(found.compared.heat) == [faults.EMBEDDING, 0, 1, 2, 3, faults.HEAD]


@pytest.mark.parametrize("name", latent_faults.FAULTS)
def test_fault_in_latent_attention(latent, name):
    found_as_planted(latent, name, latent_faults.FAULTS[name])


def test_what_was_planted_in_latent_attention_is_gone(latent):
    rollouts, engine = latent.sample()
    scores, trainer = latent.score(rollouts)
    assert latent.report(rollouts, scores, engine, trainer).verdict == "identical"
