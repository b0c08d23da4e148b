"""Steps that a graph could replay: nothing that changes from step to step lies anywhere but where the captured step read it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import variants
from bitwise import same
from replayed import replaying
from variants import SOME, sample

from isoexec.contract import CONTRACT_VARIABLE
from isoexec.ops._core import registry
from isoexec.ops._core.bits import bit_equal
from isoexec.ops._trace.recorder import Recorder
from isoexec.runtimes.vllm import graphs

#: Architecture, constants of the contract, and whether prefixes are cached: the states of a hybrid then move from block to block.
MODELS = (
    ("Qwen3_5ForCausalLM", {"gdn_form": "cpr"}, False),
    ("Qwen3_5MoeForConditionalGeneration", {"gdn_form": "cpr_wy"}, True),
    ("Glm4MoeLiteForCausalLM", {}, False),
)


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model[0])
def engine(request, made, open_engine):
    architecture, numerics, caching = request.param
    folder, contract = made(architecture, **numerics)
    with open_engine(folder, contract=contract, enable_prefix_caching=caching) as engine:
        yield engine


@pytest.fixture(scope="module")
def together(engine, prompts):
    return sample(engine, prompts)


def test_replayed_steps_have_the_bits_of_their_own(engine, prompts, together, monkeypatch):
    """Twelve sequences in a graph of sixteen, one in a graph of one, and some that are evicted and recomputed in the middle."""
    with replaying(engine._runner, monkeypatch):
        before, ops = Counter(graphs.replays()), Counter(registry.served())
        assert all(same(sample(engine, prompts), together))
        served = Counter(registry.served()) - ops
        engine.reset_prefix_cache()
        assert all(same(sample(engine, prompts, SOME[3:7], evict_at=(3,)), together[3:7]))
        engine.reset_prefix_cache()
        engine.fill_kv_cache(float("nan"))
        assert same(sample(engine, prompts, SOME[:1]), together[:1]) == [True]  # its first step is of one token
        replays = Counter(graphs.replays()) - before
    assert replays[16] and replays[5] and replays[1] == variants.TOKENS
    assert {op for op, case, _ in served if case == "engine_decode"} >= {"norm.gated_rms_norm", "gdn.conv1d_step"} or not hybrid(engine)


def test_what_replays_record_is_what_eager_steps_record(engine, prompts, monkeypatch):
    """At the level that a graph's kernels can record, of every op; six sequences in a graph of eight."""

    def recorded(steps):
        engine.reset_prefix_cache()
        recorder = Recorder("ops")
        with registry.observing(recorder), steps:
            sample(engine, prompts, SOME[:6])
        found = recorder.finish()
        return rows_of(found), sorted((entry["case"], entry["layer"], entry["stages"], entry["passes"]) for entry in found["lists"])

    rows, lists = recorded(contextlib.nullcontext())
    replayed, same_lists = recorded(replaying(engine._runner, monkeypatch))
    assert len(rows) > 40 and replayed.keys() == rows.keys() and lists == same_lists
    assert [at for at in rows if replayed[at] != rows[at]] == []


def rows_of(found):
    """(layer, stage, occurrence, field) -> {(sequence, position): digest}."""
    rows = {}
    for stream in found["streams"]:
        sequence, position = (torch.frombuffer(bytearray(stream[name]), dtype=torch.int32).tolist() for name in ("sequence", "position"))
        for field in stream["fields"]:
            digests = torch.frombuffer(bytearray(field["data"]), dtype=torch.int64).tolist()
            at = stream["layer"], stream["stage"], stream["occurrence"], field["name"]
            rows.setdefault(at, {}).update(zip(zip(sequence, position), digests, strict=True))
    return rows


def hybrid(engine):
    from vllm.v1.kv_cache_interface import MambaSpec

    return any(isinstance(group.kv_cache_spec, MambaSpec) for group in engine._runner.kv_cache_config.kv_cache_groups)


def test_a_buffer_of_one_step_is_seen(engine, prompts, together, monkeypatch):
    """Negative control: metadata whose tensors are made anew for each step."""
    from isoexec.runtimes.vllm import attention, gdn

    builder, names = (gdn.MetadataBuilder, ("slots", "positions")) if hybrid(engine) else (attention.MetadataBuilder, ("seq_lens",))
    build = builder.build
    for name in names:
        with monkeypatch.context() as patch:

            def anew(self, *args, name=name, **kwargs):
                found = build(self, *args, **kwargs)
                return dataclasses.replace(found, **{name: getattr(found, name).clone()})

            patch.setattr(builder, "build", anew)
            with replaying(engine._runner, monkeypatch):
                assert not any(same(sample(engine, prompts, SOME[4:8]), together[4:8])), name


class Pages:
    """Two layers whose pages other sequences have left, and a builder for them."""

    def __init__(self, contract, block_size=48, pages=16, lanes=8):
        from vllm.v1.kv_cache_interface import MambaSpec

        from isoexec.runtimes.vllm import gdn

        self.contract, self.lanes, self.pages = contract, lanes, pages
        shapes, dtypes = gdn.state_shapes(contract, 1, 2, 16, 16, 4), gdn.state_dtypes(contract)
        self.layers = {
            name: SimpleNamespace(prefix=name, kv_cache=[drawn(pages, *shape).to(dtype) for shape, dtype in zip(shapes, dtypes)])
            for name in ("first", "second")
        }
        config = SimpleNamespace(
            cache_config=SimpleNamespace(mamba_cache_mode="align"),
            scheduler_config=SimpleNamespace(max_num_seqs=lanes),
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
        )
        spec = MambaSpec(block_size=block_size, shapes=shapes, dtypes=dtypes)
        self.builder = gdn.MetadataBuilder(spec, list(self.layers), config, torch.device("cpu"))

    def metadata(self, seq_lens, table, rows, stored=None):
        """Of a step of single tokens, padded to ``rows`` lanes as vLLM's model runner does; ``stored``: where each token's keys go."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        count = len(seq_lens)
        starts = torch.tensor([*range(count + 1), *[count] * (rows - count)], dtype=torch.int32)
        seq_lens = torch.tensor([*seq_lens, *[0] * (rows - count)], dtype=torch.int32)
        table = torch.cat((table, table.new_zeros(rows - count, table.shape[1])))
        return self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=seq_lens,
                num_reqs=rows,
                num_actual_tokens=rows,
                max_query_len=1,
                max_seq_len=int(seq_lens.max()),
                block_table_tensor=table,
                slot_mapping=torch.tensor((stored or [0] * count) + [-1] * (rows - count)),
                seq_lens_cpu_upper_bound=seq_lens,
            ),
        )

    def step(self, metadata, rows):
        """Convolution and core of the first layer on ``rows`` of channels: (outputs, every page after it)."""
        from vllm.forward_context import override_forward_context

        from isoexec.ops import gdn as ops
        from isoexec.runtimes.vllm import gdn

        with override_forward_context(SimpleNamespace(attn_metadata={"first": metadata})):
            convolve, mix = gdn.callbacks(self.layers["first"], self.contract)
        x = convolve(rows, drawn(64, 4, seed=1).bfloat16())
        q, k, v = (part.unflatten(-1, (-1, 16)) for part in x.split((16, 16, 32), -1))
        g, beta = torch.full((len(rows), 2), -0.1), torch.full((len(rows), 2), 0.5)
        return x, mix(ops.l2norm(q), ops.l2norm(k), v, g, beta), [field.clone() for field in self.layers["first"].kv_cache]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=("cpr", "cpr_wy"))
def pages(request, made, open_engine, monkeypatch):
    from isoexec.contract import active_contract

    monkeypatch.setenv(CONTRACT_VARIABLE, made("Qwen3_5ForCausalLM", gdn_form=request.param)[1])
    return Pages(active_contract())


def test_metadata_of_every_step_lies_in_one_place(pages):
    found = []
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        count = int(torch.randint(1, pages.lanes + 1, (1,), generator=draw))
        seq_lens = torch.randint(2, 4 * 48, (count,), generator=draw)
        table = torch.randint(1, pages.pages, (count, 4), generator=draw, dtype=torch.int32)
        m = pages.metadata(seq_lens.tolist(), table, pages.lanes)
        padding = pages.lanes - count
        assert m.slots.tolist() == [int(row[(n - 1) // 48]) for row, n in zip(table, seq_lens.tolist())] + [-1] * padding
        assert m.positions.tolist() == (seq_lens - 1).tolist() + [0] * padding
        assert (m.plan, m.num_actual_tokens, m.max_query_len) == (None, pages.lanes, 1)
        found.append((m.slots.data_ptr(), m.positions.data_ptr(), *m.slots.tolist()))
    assert len({entry[:2] for entry in found}) == 1 and len({entry[2:] for entry in found}) == 8


def test_a_dummy_step_names_no_page(pages):
    """vLLM warms its kernels up and captures with the block table of whatever ran last."""
    table = torch.tensor([[3], [3], [7]], dtype=torch.int32)
    assert pages.metadata([1, 1, 1], table, 4, stored=[0, -1, -1]).slots.tolist() == [3, -1, -1, -1]
    assert pages.metadata([1, 1, 1], table, 3, stored=[-1, -1, -1]).slots.tolist() == [-1, -1, -1]


def test_a_sequence_that_begins_with_a_single_token_has_nothing_before_it(pages):
    table = torch.tensor([[3], [7], [9]], dtype=torch.int32)
    before = [[field.clone() for field in layer.kv_cache] for layer in pages.layers.values()]
    pages.metadata([5, 1, 1], table, pages.lanes)
    for layer, (windows, *fields) in zip(pages.layers.values(), before):
        windows[[0, 7, 9]] = 0  # the null block is no sequence's
        assert all(bit_equal(now, expected) for now, expected in zip(layer.kv_cache, (windows, *fields)))


def test_padding_is_inert(pages):
    """Lanes that pad a captured step move no bit of the others, and write no page."""
    seq_lens, table, rows = [40, 2, 16], torch.tensor([[3], [7], [9]], dtype=torch.int32), drawn(8, 64, seed=2).bfloat16()
    rows[3:] = float("nan")
    before = [field.clone() for field in pages.layers["first"].kv_cache]

    def run(lanes, change=lambda m: m):
        for field, old in zip(pages.layers["first"].kv_cache, before):
            field.copy_(old)
        return pages.step(change(pages.metadata(seq_lens, table, lanes)), rows[:lanes])

    *alone, state = run(3)
    *padded, after = run(8)
    for expected, found in zip(alone, padded):
        assert bit_equal(found[:3].contiguous(), expected) and not found[3:].any()
    assert all(bit_equal(x, y) for x, y in zip(state, after))
    untouched = [page for page in range(pages.pages) if page not in (3, 7, 9)]
    assert all(bit_equal(x[untouched], y[untouched]) for x, y in zip(before, after))

    def misled(m):  # negative control: a lane of padding that names a page
        m.slots[3] = 5
        return m

    rows[3:] = 1.0
    *_, after = run(8, misled)
    assert not bit_equal(state[0][5], after[0][5]) and bit_equal(state[0][3], after[0][3])
