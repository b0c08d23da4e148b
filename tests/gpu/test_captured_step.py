"""A decode step in a CUDA graph, recorded by the kernels that were captured with it (bookkeeping: tests/trace/test_captured.py)."""

import pytest
import torch

from bench.passes import QWEN3_8B, DecodeStep
from isoexec.ops._core import registry
from isoexec.ops._core.bits import nudge
from isoexec.ops._trace.recorder import Recorder
from isoexec.verify.trace import bundle
from isoexec.verify.trace.report import lines, open_report

SIZES = QWEN3_8B._replace(layers=3, context=300, vocabulary=4096)


@pytest.fixture(scope="module")
def step(hardware):
    made = DecodeStep(SIZES, hardware)
    made.run()  # compiles
    return made


def recorded(step, recorder):
    """The step in a graph with its digests, and what is to be read after a replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), registry.observing(recorder), recorder.capturing() as captured:
        step.run(lambda: recorder.begin(*step.rows()))
    return graph, captured


def eager(step, level):
    recorder = Recorder(level)
    with registry.observing(recorder):
        step.run(lambda: recorder.begin(*step.rows()))
    return recorder.finish()


def replayed(step, level, ids):
    """(recording of one replay for each of ``ids``, the same eagerly)."""
    found, expected = [], []
    for tokens in ids:
        recorder = Recorder(level)
        graph, captured = recorded(step, recorder)
        step.ids.copy_(tokens)
        graph.replay()
        recorder.replayed(captured, step.rows())
        found.append(recorder.finish())
        expected.append(eager(step, level))
    return found, expected


def drawn(step, *seeds):
    return [torch.randint(SIZES.vocabulary, (SIZES.batch,), generator=torch.Generator().manual_seed(s)).to(step.ids.device) for s in seeds]


@pytest.mark.parametrize("level", ("layers", "ops"))
def test_a_replay_is_recorded_as_an_eager_step_is(step, level):
    found, expected = replayed(step, level, drawn(step, 1, 2))
    assert found == expected and found[0]["streams"] != found[1]["streams"]


@pytest.mark.parametrize("level", ("layers", "ops"))
def test_many_replays_of_one_graph(step, level):
    """None is read before it is written, nor after the next has begun."""
    recorder, ids = Recorder(level), drawn(step, *range(20))
    graph, captured = recorded(step, recorder)
    for tokens in ids:
        step.ids.copy_(tokens)
        graph.replay()
        recorder.replayed(captured, step.rows())
    plain = Recorder(level)
    with registry.observing(plain):
        for tokens in ids:
            step.ids.copy_(tokens)
            step.run(lambda: plain.begin(*step.rows()))
    assert recorder.finish() == plain.finish()


def test_recording_moves_no_bit(step):
    graph, _ = recorded(step, Recorder("ops"))
    captured = step.logprobs
    graph.replay()
    found = captured.clone()
    step.run()
    assert torch.equal(found.view(torch.int32), step.logprobs.view(torch.int32))


def test_one_ulp_in_one_replay_is_found(step, tmp_path):
    clean = eager(step, "ops")
    recorder = Recorder("ops")
    graph, captured = recorded(step, recorder)
    weight = step.layers[1].post_attention_norm
    before = weight.clone()
    weight.copy_(nudge(weight, int(weight.abs().argmax())))
    graph.replay()
    recorder.replayed(captured, step.rows())
    weight.copy_(before)
    sides = [("trainer", clean, None, {}), ("engine", recorder.finish(), None, {})]
    tokens = {n: bundle.Sequence([0] * SIZES.context, SIZES.context) for n in range(SIZES.batch)}
    bundle.write(tmp_path / "both.zip", tokens, sides, {})
    found = open_report([tmp_path / "both.zip"])
    first = found.compared.first
    assert found.verdict == "divergent" and (first.where.layer, first.where.stage, first.where.occurrence) == (1, "norm.rms_norm", 3)
    assert [f.name for f in first.fields] == ["out"], lines(found)
