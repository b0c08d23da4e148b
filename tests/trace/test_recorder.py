"""The recorder on ops alone: what it sees of a packed pass and of a pass in steps is the same, and nothing happens without one."""

import pytest
import torch

from isoexec.contract import CASES, ContractError
from isoexec.contract.architectures import REGIONS, regions
from isoexec.ops import attention, gdn, matmul, norm
from isoexec.ops._core import registry
from isoexec.ops._core.registry import EMBEDDING, HEAD
from isoexec.ops._trace.recorder import Recorder, Wanted
from isoexec.ops._trace.stages import STAGES
from isoexec.runtimes import evidence

LENGTHS, HEADS, GROUPS, SIZE = (5, 9, 3), 4, 2, 16
#: Statistics of the trainer, and what greedy tokens take, which have no logprob.
UNREAD = {"moe.tokens_per_expert", "moe.load_balancing_loss", "moe.update_expert_bias", "sampling.split_greedy", "sampling.first_maximum"}
BOUNDS = torch.tensor([0, 5, 14, 17], dtype=torch.int32)


def rows_of(lengths, starts=(0, 0, 0)):
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return sequence, torch.cat([torch.arange(n) + s for n, s in zip(lengths, starts)])


def columns(recording, stage, field):
    """(sequence, position) -> value of a field, over every case."""
    found = {}
    for stream in recording["streams"]:
        if stream["stage"] == stage and stream["layer"] == 0:
            tokens = zip(*(torch.frombuffer(bytearray(stream[k]), dtype=torch.int32).tolist() for k in ("sequence", "position")))
            [data] = [f["data"] for f in stream["fields"] if f["name"] == field]
            values = torch.frombuffer(bytearray(data), dtype=torch.int64).tolist()
            assert not found.keys() & set(
                zip(*(torch.frombuffer(bytearray(stream[k]), dtype=torch.int32).tolist() for k in ("sequence", "position")))
            )
            found |= dict(zip(tokens, values, strict=True))
    return found


def test_every_op_of_every_architecture_has_a_stage():
    for architecture in REGIONS:
        for form in ("cpr", "cpr_wy"):
            for region in regions(architecture, form):
                ops = {op for case in CASES for op in region.ops(case)} | set(region.optional)
                assert ops - STAGES.keys() <= UNREAD, region.name


def test_stages_name_arguments_that_ops_have():
    known = evidence.declarations()
    for op, reads in STAGES.items():
        for read in reads:
            assert {*read.inputs, *read.weights, *read.constants, *read.sampling} <= set(known[op].parameters), op


class Spy:
    def __init__(self):
        self.seen = []

    def before(self, declaration, args, kwargs):
        self.seen.append(declaration.name)
        return declaration.name

    def after(self, seen, result):
        self.seen.append((seen, registry.current_op()))


def test_an_observer_sees_the_outermost_op_and_nothing_without_one():
    spy = Spy()
    probe = registry.op("test.outer", cpu=f"{__name__}:outer")(lambda x: None)
    try:
        with registry.observing(spy):
            assert registry.current_observer() is spy
            probe(torch.zeros(2, 4).bfloat16())
        assert spy.seen == ["test.outer", ("test.outer", "test.outer")]
        probe(torch.zeros(2, 4).bfloat16())
        assert len(spy.seen) == 2 and registry.current_observer() is None
    finally:
        registry._declared.pop("test.outer")


def outer(x):
    return norm.residual_add(x, x)


def test_an_op_that_fails_is_not_recorded_and_leaves_nothing_open():
    spy = Spy()
    with registry.observing(spy), pytest.raises(ContractError):
        matmul.row_parallel_linear(torch.zeros(2, 24).bfloat16(), torch.zeros(4, 24).bfloat16(), leaves=8)
    assert spy.seen == ["matmul.row_parallel_linear"] and registry.current_op() is None


def qkv():
    total = sum(LENGTHS)
    return [torch.randn(total, n, SIZE).bfloat16() for n in (HEADS, GROUPS, GROUPS)]


def packed(q, k, v):
    recorder = Recorder("state")
    with registry.observing(recorder), registry.executing("trainer_score"), registry.in_layer(0):
        recorder.begin(*rows_of(LENGTHS))
        attention.varlen(q, k, v, BOUNDS, scale=0.25, kv_block=16)
    return recorder.finish()


def paged(q, k, v, pieces, spoil=None):
    """The same sequences in steps of ``pieces`` tokens of each, on a cache of pages of four tokens."""
    recorder = Recorder("state")
    key_cache, value_cache = (torch.full((12, 4, GROUPS, SIZE), torch.nan).bfloat16() for _ in range(2))
    table = torch.arange(12, dtype=torch.int32).view(3, 4)[:, [1, 3, 0, 2]]
    done = [0] * len(LENGTHS)
    with registry.observing(recorder):
        while any(d < n for d, n in zip(done, LENGTHS)):
            new = [min(pieces, n - d) for d, n in zip(done, LENGTHS)]
            rows = torch.cat([BOUNDS[s] + torch.arange(d, d + n) for s, (d, n) in enumerate(zip(done, new))]).long()
            sequence, position = rows_of(new, done)
            slots = table[sequence, position // 4].long() * 4 + position % 4
            starts = torch.tensor([0, *new]).cumsum(0).int()
            with registry.executing("engine_decode" if pieces == 1 else "engine_prefill"), registry.in_layer(0):
                recorder.begin(sequence, position)
                attention.write_cache(k[rows], v[rows], key_cache, value_cache, slots)
                if spoil is not None:
                    spoil(key_cache, table)
                lengths = torch.tensor([d + n for d, n in zip(done, new)], dtype=torch.int32)
                attention.paged(q[rows], key_cache, value_cache, table, lengths, starts, scale=0.25, kv_block=16)
            done = [d + n for d, n in zip(done, new)]
    return recorder.finish()


@pytest.mark.parametrize("pieces", (1, 2, 20))
def test_attention_is_one_stage_whether_packed_or_paged(pieces):
    tensors = qkv()
    whole, steps = packed(*tensors), paged(*tensors, pieces)
    for field in ("q", "k", "v", "out", "position", "history"):
        expected = columns(whole, "attention", field)
        assert len(expected) == 17 and columns(steps, "attention", field) == expected, field
    assert [entry["stages"] for entry in whole["lists"]] == [[["attention", 0]]]
    assert all(entry["stages"] == [["attention", 0]] for entry in steps["lists"])
    assert columns(whole, "attention", "position")[1, 8] == 8


def test_a_cache_that_changes_shows_in_what_is_read_alone():
    tensors = qkv()

    def spoil(key_cache, table):
        key_cache[table[1, 0].long(), 2] = 0.5  # position 2 of sequence 1

    whole, steps = packed(*tensors), paged(*tensors, 1, spoil)
    for field in ("q", "k", "v"):
        assert columns(steps, "attention", field) == columns(whole, "attention", field)
    differ = {t for t, value in columns(steps, "attention", "history").items() if columns(whole, "attention", "history")[t] != value}
    assert differ == {(1, p) for p in range(2, 9)}


def test_a_convolution_in_steps():
    x, weight = torch.randn(sum(LENGTHS), 24).bfloat16(), torch.randn(24, 4).bfloat16()
    whole, steps = Recorder("state"), Recorder("state")
    with registry.observing(whole), registry.executing("trainer_score"), registry.in_layer(0):
        whole.begin(*rows_of(LENGTHS))
        gdn.conv1d(x, weight, gdn.Plan.from_cu_seqlens(BOUNDS, 16))
    window, slots = torch.full((5, 3, 24), torch.nan).bfloat16(), torch.tensor([4, 0, 2], dtype=torch.int32)
    first = [2, 4, 1]
    with registry.observing(steps), registry.in_layer(0):
        rows = torch.cat([BOUNDS[s] + torch.arange(n) for s, n in enumerate(first)]).long()
        with registry.executing("engine_prefill"):
            steps.begin(*rows_of(first))
            _, window[slots.long()] = gdn.conv1d(x[rows], weight, gdn.Plan(first, 16), window[slots.long()])
        for step in range(2):
            now = [n + step for n in first]
            with registry.executing("engine_decode"):
                steps.begin(torch.arange(3), torch.tensor(now))
                gdn.conv1d_step(x[BOUNDS[:-1].long() + torch.tensor(now)], weight, window, slots)
    whole, steps = whole.finish(), steps.finish()
    for field in ("x", "out", "history"):
        found, expected = columns(steps, "gdn.conv1d", field), columns(whole, "gdn.conv1d", field)
        assert len(found) == 13 and all(expected[token] == value for token, value in found.items()), field


def test_states_are_read_as_they_were_written_unless_something_changes_them():
    H, J, K, V, C = 1, 2, 16, 16, 16
    total = 40
    q, k = (gdn.l2norm(torch.randn(total, H, K).bfloat16()) for _ in range(2))
    v, g, beta = torch.randn(total, J, V).bfloat16(), -torch.rand(total, J), torch.rand(total, J)
    pool, slots = gdn.StatePool.empty(3, H, J, K, V, C), torch.tensor([1], dtype=torch.int32)
    recorder = Recorder("state")
    with registry.observing(recorder), registry.in_layer(2):
        for start, end in ((0, 30), (30, 31), (31, 32), (32, 33), (33, 34)):
            part = [x[start:end] for x in (q, k, v, g, beta)]
            recorder.begin(torch.zeros(end - start, dtype=torch.int64), torch.arange(start, end))
            if start == 33:
                pool.k[1, 0, 0, 0] += 1
            with registry.executing("engine_prefill" if end - start > 1 else "engine_decode"):
                if end - start > 1:
                    gdn.cpr_wy_prefill(*part, gdn.Plan([end - start], C, [start]), pool, slots)
                else:
                    gdn.cpr_wy_decode(*part, pool, slots, torch.tensor([start], dtype=torch.int32))
    states = {(s["what"], s["position"]): s["digest"] for s in recorder.finish()["states"]}
    assert {p for what, p in states if what == "read"} == {30, 31, 32, 33} and ("read", 0) not in states
    assert [states["read", p] == states["written", p] for p in (30, 31, 32, 33)] == [True, True, True, False]


def layers_of(fused):
    """Two layers and a final norm, with a residual sum that the engine takes in the next layer's first norm."""
    x, w, weight = torch.randn(3, 16).bfloat16(), torch.randn(16).bfloat16(), torch.randn(16, 16).bfloat16()
    recorder = Recorder()
    with registry.observing(recorder), registry.executing("engine_prefill" if fused else "trainer_score"):
        recorder.begin(torch.tensor([0, 0, -1]), torch.tensor([0, 1, 0]))
        residual = None
        for layer in range(2):
            with registry.in_layer(layer):
                if residual is None:
                    normed, residual = norm.rms_norm(x, w, 1e-6), x
                else:
                    normed, residual = norm.add_rms_norm(x, residual, w, 1e-6)
                x = matmul.linear(normed, weight)
                if not fused:
                    x, residual = norm.residual_add(x, residual), None
        if fused:
            norm.add_rms_norm(x, residual, w, 1e-6)
        else:
            norm.rms_norm(x, w, 1e-6)
    return recorder.finish()


def test_a_fused_sum_belongs_to_the_layer_that_it_ends(monkeypatch):
    torch.manual_seed(1)
    apart = layers_of(False)
    torch.manual_seed(1)
    fused = layers_of(True)
    lists = [{entry["layer"]: entry["stages"] for entry in r["lists"]} for r in (apart, fused)]
    assert lists[0] == lists[1] and lists[0][1] == [["norm.rms_norm", 0], ["matmul.linear", 0], ["norm.residual_add", 0]]
    assert lists[0][HEAD] == [["norm.rms_norm", 0]] and EMBEDDING not in lists[0]
    for a, b in zip(*(sorted(r["streams"], key=lambda s: (s["layer"], s["order"])) for r in (apart, fused)), strict=True):
        assert a["sequence"] == b["sequence"] and len(a["sequence"]) == 2 * 4  # the padding row is left out
        for field in b["fields"]:
            assert field in a["fields"]
    assert apart["weights"] == fused["weights"] and apart["constants"] == fused["constants"]


def test_products_of_one_input_are_one_stage():
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    order = torch.randperm(24)
    found = []
    for weights in ((weight,), (weight[:16], weight[16:]), (weight[order],)):
        recorder = Recorder()
        with registry.observing(recorder), registry.executing("trainer_score"), registry.in_layer(0):
            for _ in range(2):  # passes
                recorder.begin(*rows_of((4,)))
                for w in weights:
                    matmul.linear(x, w)
        r = recorder.finish()
        assert [entry["stages"] for entry in r["lists"]] == [[["matmul.linear", 0]]]
        [stream] = r["streams"]
        found.append((sorted((f["name"], f["width"], f["data"]) for f in stream["fields"]), r["weights"]))
    assert found[0] == found[1] == found[2]


def test_chosen_sequences_rows_and_passes():
    x, w = torch.randn(6, 16).bfloat16(), torch.ones(16).bfloat16()
    recorder = Recorder(sequences=[7], wanted=[Wanted(0, "norm.rms_norm", 0, 7, 1)], numbers=[5, 7])
    with registry.observing(recorder), registry.executing("engine_decode"), registry.in_layer(0):
        norm.rms_norm(x, w, 1e-6)  # before a pass: not recorded
        recorder.begin(torch.tensor([0, 1, 1]), torch.tensor([4, 0, 1]))
        out = norm.rms_norm(x, w, 1e-6)  # rows beyond the third are an engine's padding
        recorder.idle()
        norm.rms_norm(x, w, 1e-6)
    found = recorder.finish()
    [stream] = found["streams"]
    assert torch.frombuffer(bytearray(stream["sequence"]), dtype=torch.int32).tolist() == [7, 7]
    kept = {t["field"]: t["data"] for t in found["tensors"]}
    assert kept == {"x": x[2].view(torch.uint8).numpy().tobytes(), "out": out[2].view(torch.uint8).numpy().tobytes()}
    with registry.observing(recorder := Recorder()), registry.executing("trainer_score"), registry.in_layer(0):
        recorder.begin(torch.tensor([0, 0]), torch.tensor([0, 1]))
        norm.rms_norm(x, w, 1e-6)  # a trainer has no padding of its own: these rows are somebody else's
    assert not recorder.finish()["streams"] and recorder.unplaced == {"x": 1, "out": 1}
    with pytest.raises(ContractError, match="level: expected one of layers, ops, state, found 'all'"):
        Recorder("all")


@pytest.mark.parametrize("level", ("ops", "state"))
def test_a_write_between_two_ops(level):
    """What an op returned is read once below level ``state``; a tensor that stands in its place is another."""
    x, w, weight = torch.randn(3, 16).bfloat16(), torch.ones(16).bfloat16(), torch.randn(16, 16).bfloat16()

    def run(between):
        recorder = Recorder(level)
        with registry.observing(recorder), registry.executing("trainer_score"), registry.in_layer(0):
            recorder.begin(*rows_of((3,)))
            matmul.linear(between(norm.rms_norm(x, w, 1e-6)), weight)
        recording = recorder.finish()
        return columns(recording, "norm.rms_norm", "out"), columns(recording, "matmul.linear", "x")

    out, read = run(lambda y: y)
    assert out == read
    for change, seen in ((lambda y: y * 2, True), (lambda y: y.mul_(2), level == "state")):
        again, read = run(change)
        assert again == out and all((read[token] != out[token]) == seen for token in out)


def test_constants_of_ops_that_share_a_stage():
    """The cache write comes first and has none."""
    constants = [entry for entry in paged(*qkv(), 2)["constants"] if entry["stage"] == "attention"]
    assert [entry["values"] for entry in constants] == [{"scale": "0.25", "kv_block": "16"}]


def test_a_constant_that_is_not_given_is_its_default():
    """One runtime may leave it out where another gives it."""
    from isoexec.ops import rope

    x, angles = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 4)
    for given in ({}, {"interleaved": False}, {"interleaved": True}):
        recorder = Recorder()
        with registry.observing(recorder), registry.executing("trainer_score"), registry.in_layer(0):
            recorder.begin(*rows_of((3,)))
            rope.apply_rope(x, angles, angles, **given)
        [found] = recorder.finish()["constants"]
        assert found["values"] == {"interleaved": str(given.get("interleaved", False))}


def test_a_parameter_of_one_dimension_and_one_that_is_not_given():
    from isoexec.ops import moe

    logits, bias = torch.randn(4, 8), torch.randn(8)
    for given in ({}, {"scoring": "sigmoid", "expert_bias": bias}):
        recorder = Recorder()
        with registry.observing(recorder), registry.executing("trainer_score"), registry.in_layer(0):
            recorder.begin(*rows_of((4,)))
            moe.route(logits, top_k=2, renormalize=True, **given)
        assert [w["name"] for w in recorder.finish()["weights"]] == (["expert_bias"] if given else [])
