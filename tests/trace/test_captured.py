"""Captured passes, as far as a CPU can show them: what is written where, and whose it is after a replay.

No graph runs here: :func:`replay` puts into the sheets what the captured kernels would write. On a GPU
tests/gpu/test_captured_step.py replays one.
"""

import pytest
import torch

from bench.passes import TINY, DecodeStep
from isoexec.contract import ContractError
from isoexec.ops import matmul, norm
from isoexec.ops._core import registry
from isoexec.ops._core.bits import nudge
from isoexec.ops._core.registry import EMBEDDING, HEAD
from isoexec.ops._trace import context
from isoexec.ops._trace.recorder import Recorder, Wanted

LEVELS = ("layers", "ops")


@pytest.fixture(scope="module")
def step():
    return DecodeStep(TINY, "cpu")


def capture(step, recorder):
    """Nobody's rows: the runtime does not know yet whose they will be."""
    nobody = torch.full((TINY.batch,), -1), torch.zeros(TINY.batch, dtype=torch.int64)
    with registry.observing(recorder), recorder.capturing() as captured:
        step.run(lambda: recorder.begin(*nobody))
    return captured


def replay(step, recorder, captured, *rows):
    """What a graph's launch does to the sheets, and what the host does then."""
    fresh = capture(step, Recorder(recorder.level))
    for (_, sheets), (_, written) in zip(captured.parts, fresh.parts, strict=True):
        for sheet, values in zip(sheets, written, strict=True):
            sheet.copy_(values)
    recorder.replayed(captured, *rows)


def eager(step, level, rows, ids, **options):
    recorder = Recorder(level, **options)
    with registry.observing(recorder):
        for tokens in ids:
            step.ids.copy_(tokens)
            step.run(lambda: recorder.begin(*rows))
    return recorder.finish()


def drawn(*seeds):
    return [torch.randint(TINY.vocabulary, (TINY.batch,), generator=torch.Generator().manual_seed(seed)) for seed in seeds]


@pytest.mark.parametrize("level", LEVELS)
def test_replays_are_recorded_as_eager_passes_are(step, level):
    recorder, ids = Recorder(level), drawn(1, 2)
    captured = capture(step, recorder)
    for tokens in ids:
        step.ids.copy_(tokens)
        replay(step, recorder, captured, step.rows())
    found = recorder.finish()
    assert found == eager(step, level, step.rows(), ids)
    assert {s["layer"] for s in found["streams"]} == {EMBEDDING, 0, 1, 2, HEAD} and not found["unplaced"]
    assert all(entry["passes"] == 2 for entry in found["lists"])
    assert found["level"] == "layers" or len(found["weights"]) == 3 * 8 + 3
    assert found != eager(step, level, step.rows(), drawn(1, 3))


def test_padding_and_rows_that_nobody_asked_for(step):
    sequence, position = (part[:3] for part in step.rows())
    sequence = torch.tensor([1, -1, 0])
    options = dict(sequences=[7], numbers=[5, 7])
    recorder = Recorder("ops", **options)
    captured = capture(step, recorder)
    replay(step, recorder, captured, (sequence, position))
    found = recorder.finish()
    padded = torch.cat((sequence, torch.tensor([-1]))), step.rows()[1]
    assert found == eager(step, "ops", padded, [step.ids], **options)
    assert torch.frombuffer(bytearray(found["streams"][0]["sequence"]), dtype=torch.int32).tolist() == [7]


def test_eager_and_captured_passes_are_one_recording(step):
    """A batch that no graph is of runs as it is, between the replays of others."""
    recorder, (first, second) = Recorder("ops"), drawn(4, 5)
    captured = capture(step, recorder)
    step.ids.copy_(first)
    replay(step, recorder, captured, step.rows())
    step.ids.copy_(second)
    with registry.observing(recorder):
        step.run(lambda: recorder.begin(*step.rows()))
    found, expected = recorder.finish(), eager(step, "ops", step.rows(), [second, first])
    assert [s["stage"] for s in found["streams"]] == [s["stage"] for s in expected["streams"]]
    assert [s["fields"] for s in found["streams"]] == [s["fields"] for s in expected["streams"]]  # eager chunks come first
    assert found["lists"] == expected["lists"] and found["weights"] == expected["weights"]


def head(recorder, x, w, products):
    """A pass whose head takes some of its rows, and whose products of one input are one stage."""
    with registry.observing(recorder), registry.executing("engine_decode"):
        recorder.begin(torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x)))
        with registry.in_layer(0):
            normed = norm.rms_norm(x, w, 1e-6)
            for product in products:
                matmul.linear(normed, product)
        recorder.select(torch.zeros(1, dtype=torch.int64), torch.tensor([len(x) - 1]))
        matmul.lm_head(normed[-1:], products[0])


@pytest.mark.parametrize("pieces", (1, 2))
def test_parts_of_a_pass_and_products_that_add_up(pieces):
    x, w, product = torch.randn(5, 16).bfloat16(), torch.ones(16).bfloat16(), torch.randn(32, 16).bfloat16()
    plain, recorder = Recorder(), Recorder()
    head(plain, x, w, product.chunk(pieces))
    with recorder.capturing() as captured:
        head(recorder, x, w, product.chunk(pieces))
    assert [len(rows.sequence) for rows, _ in captured.parts] == [5, 1]
    zeros = torch.zeros(5, dtype=torch.int64)
    recorder.replayed(captured, (zeros, torch.arange(5)), (zeros[:1], torch.tensor([4])))
    assert recorder.finish() == plain.finish()


def body(recorder, x, w, product):
    """A layer and the norm after it, as an engine's forward pass."""
    with registry.observing(recorder), registry.executing("engine_decode"):
        recorder.begin(torch.arange(len(x)), torch.full((len(x),), 7))
        with registry.in_layer(0):
            y = matmul.linear(norm.rms_norm(x, w, 1e-6), product)
        return norm.rms_norm(y, w, 1e-6)


def tail(recorder, x, product):
    """The head, on the last row of two sequences."""
    with registry.observing(recorder), registry.executing("engine_decode"):
        recorder.select(torch.tensor([1, 3]), torch.full((2,), 7))
        matmul.lm_head(x[[1, 3]], product)


@pytest.mark.parametrize("level", LEVELS)
def test_a_pass_that_goes_on_after_its_graph(level):
    """As an engine's does: its head runs outside. The head is visited once, as in a pass that was not captured."""
    x, w, product = torch.randn(4, 16).bfloat16(), torch.ones(16).bfloat16(), torch.randn(16, 16).bfloat16()
    plain, recorder = Recorder(level), Recorder(level)
    for _ in range(2):
        tail(plain, body(plain, x, w, product), product)
    with registry.observing(recorder), recorder.capturing() as captured:
        y = body(recorder, x, w, product)
    rows = torch.arange(4), torch.full((4,), 7)
    for _ in range(2):  # what a graph's launch writes is what the capture wrote on a CPU
        recorder.replayed(captured, rows, goes_on=True)
        tail(recorder, y, product)
    found, expected = recorder.finish(), plain.finish()
    lists = [sorted(side["lists"], key=lambda entry: entry["layer"]) for side in (found, expected)]
    assert lists[0] == lists[1] and [entry["passes"] for entry in lists[0]] == [2, 2]
    by_place = {(s["layer"], s["stage"], s["occurrence"]): s for s in found["streams"]}
    assert by_place == {(s["layer"], s["stage"], s["occurrence"]): s for s in expected["streams"]}


def test_one_ulp_in_one_replay_is_at_one_site(step):
    recorder, (ids,) = Recorder("ops"), drawn(6)
    captured, weight = capture(step, recorder), step.layers[1].post_attention_norm
    step.ids.copy_(ids)
    replay(step, recorder, captured, step.rows())
    clean = weight.clone()
    weight.copy_(nudge(weight, int(weight.abs().argmax())))
    replay(step, recorder, captured, step.rows())
    weight.copy_(clean)
    changed = []
    for stream in recorder.finish()["streams"]:
        for about in stream["fields"]:
            first, second = torch.frombuffer(bytearray(about["data"]), dtype=torch.int64).chunk(2)
            if not torch.equal(first, second):
                changed.append((stream["layer"], stream["order"], stream["stage"], about["name"]))
    layer, _, stage, name = min(changed)
    assert (layer, stage, name) == (1, "norm.rms_norm", "out")


def test_what_a_replay_cannot_read_is_refused(step):
    for options, found in ((dict(level="state"), "level state"), (dict(wanted=[Wanted(0, "norm.rms_norm", 0, 0, 0)]), "rows kept whole")):
        with pytest.raises(ContractError, match=f"trace: {found}: expected level layers or ops in a captured pass"):
            capture(step, Recorder(**options))
    recorder = Recorder("layers")
    captured = capture(step, recorder)
    for rows in ((), (step.rows(), step.rows()), ((torch.zeros(5, dtype=torch.int64), torch.arange(5)),)):
        with pytest.raises(ContractError, match=r"replay: expected rows for parts of at most \[4\], found"):
            recorder.replayed(captured, *rows)
    assert not recorder.finish()["streams"]


def test_a_capture_that_fails_leaves_the_recorder_as_it_was(step):
    recorder = Recorder("ops")
    with registry.observing(recorder):
        step.run(lambda: recorder.begin(*step.rows()))
        with pytest.raises(ZeroDivisionError), recorder.capturing():
            recorder.begin(*step.rows())
            raise ZeroDivisionError
    assert recorder.finish() == eager(step, "ops", step.rows(), [step.ids])


def test_positions_where_lanes_pad_a_step():
    """Two sequences in a graph of four: the rows beyond have no sequence, and are read nowhere."""
    a = {"query_start_loc": torch.tensor([0, 1, 2, 2, 2]), "seq_lens": torch.tensor([5, 3, 0, 0]), "q": torch.zeros(4, 1, 1)}
    assert context.of_pages(a, None)[:2].tolist() == [4, 2]
