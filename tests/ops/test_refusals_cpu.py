"""What ops refuse, named: the op, the argument, what was expected and what was found. The checks come before any implementation."""

import contextvars

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import activation, attention, embedding, logprob, matmul, moe, norm, rope, sampling
from isoexec.ops._core import registry


def bf16(*shape):
    return torch.ones(shape, dtype=torch.bfloat16)


def fp32(*shape):
    return torch.ones(shape)


IDS, CU = torch.tensor([1, 0, 1]), torch.tensor([0, 3], dtype=torch.int32)
CHOSEN = torch.tensor([[0, 1]] * 3)
SIZES = dict(vocab_size=8, vocab_block=4)
SETTINGS = dict(scale=1.0, kv_block=16)
#: Op -> (function, its arguments in order, keywords): a call that is served.
CALLS = {
    "matmul.linear": (matmul.linear, dict(x=bf16(3, 4), weight=bf16(5, 4), bias=bf16(5)), {}),
    "matmul.row_parallel_linear": (matmul.row_parallel_linear, dict(x=bf16(3, 16), weight=bf16(5, 16)), dict(leaves=1)),
    "matmul.lm_head": (matmul.lm_head, dict(x=bf16(3, 4), weight=bf16(5, 4)), {}),
    "moe.router_logits": (moe.router_logits, dict(x=bf16(3, 4), weight=bf16(5, 4)), {}),
    "moe.route": (moe.route, dict(logits=fp32(3, 4)), dict(top_k=2, renormalize=True)),
    "moe.dispatch": (moe.dispatch, dict(x=bf16(3, 4), weights=fp32(3, 2), experts=CHOSEN), {}),
    "moe.expert_mlp": (moe.expert_mlp, dict(x=bf16(3, 4), experts=CHOSEN, gate_up=bf16(2, 6, 4), down=bf16(2, 4, 3)), {}),
    "moe.combine": (
        moe.combine, dict(values=bf16(3, 2, 4), weights=fp32(3, 2), experts=CHOSEN, shared=bf16(3, 4)), dict(num_experts=2, combine_groups=2),
    ),
    "norm.residual_add": (norm.residual_add, dict(x=bf16(3, 4), residual=bf16(3, 4)), {}),
    "norm.rms_norm": (norm.rms_norm, dict(x=bf16(3, 4), weight=bf16(4)), dict(eps=1e-6)),
    "norm.zero_centered_rms_norm": (norm.zero_centered_rms_norm, dict(x=bf16(3, 4), weight=bf16(4)), dict(eps=1e-6)),
    "norm.add_rms_norm": (norm.add_rms_norm, dict(x=bf16(3, 4), residual=bf16(3, 4), weight=bf16(4)), dict(eps=1e-6)),
    "norm.add_zero_centered_rms_norm": (norm.add_zero_centered_rms_norm, dict(x=bf16(3, 4), residual=bf16(3, 4), weight=bf16(4)), dict(eps=1e-6)),
    "norm.gated_rms_norm": (norm.gated_rms_norm, dict(x=bf16(3, 4), gate=bf16(3, 4), weight=fp32(4)), dict(eps=1e-6)),
    "activation.silu_mul": (activation.silu_mul, dict(gate_up=bf16(3, 4)), {}),
    "activation.sigmoid_gate": (activation.sigmoid_gate, dict(x=bf16(3, 4), gate=bf16(3, 1)), {}),
    "embedding.embedding": (embedding.embedding, dict(ids=IDS, weight=bf16(5, 4)), {}),
    "rope.rope_table": (rope.rope_table, dict(positions=IDS), dict(rotary_dim=4, theta=1e4)),
    "rope.apply_rope": (rope.apply_rope, dict(x=bf16(3, 2, 4), cos=fp32(3, 2), sin=fp32(3, 2)), {}),
    "attention.varlen": (attention.varlen, dict(q=bf16(3, 2, 4), k=bf16(3, 1, 4), v=bf16(3, 1, 4), cu_seqlens=CU), SETTINGS),
    "attention.paged": (
        attention.paged,
        dict(
            q=bf16(3, 2, 4), key_cache=bf16(2, 16, 1, 4), value_cache=bf16(2, 16, 1, 4), block_table=CU[None], seq_lens=CU[1:], query_start_loc=CU
        ),
        SETTINGS,
    ),
    "attention.write_cache": (
        attention.write_cache,
        dict(k=bf16(3, 1, 4), v=bf16(3, 1, 4), key_cache=bf16(2, 16, 1, 4), value_cache=bf16(2, 16, 1, 4), slot_mapping=IDS),
        {},
    ),
    "logprob.scale_by_temperature": (logprob.scale_by_temperature, dict(logits=fp32(3, 8), temperature=fp32(3)), {}),
    "logprob.log_softmax": (logprob.log_softmax, dict(logits=fp32(3, 8)), SIZES),
    "logprob.token_logprob": (logprob.token_logprob, dict(logits=fp32(3, 8), tokens=IDS), SIZES),
    "sampling.draw": (sampling.draw, dict(logprobs=fp32(3, 8)), dict(generators=[None] * 3)),
    "sampling.split_greedy": (sampling.split_greedy, dict(temperature=fp32(3)), {}),
    "sampling.first_maximum": (sampling.first_maximum, dict(logits=fp32(3, 8)), {}),
}  # fmt: skip


def call(op, **instead):
    """In a context of its own, where nothing asks for values before the last rounding."""
    function, operands, keywords = CALLS[op]
    return contextvars.Context().run(function, *(operands | instead).values(), **keywords)


@pytest.mark.parametrize("op", CALLS)
def test_another_dtype_is_refused(op):
    """Each operand in turn; fp32 ones are taken inside `before_rounding` alone."""
    call(op)
    for name, x in CALLS[op][1].items():
        for dtype in {torch.float64, torch.float16, torch.float32} - ({torch.float32} if x.dtype == torch.float32 else set()):
            with pytest.raises(ContractError, match=rf"op {op}: {name}: expected torch.*, found {dtype}"):
                call(op, **{name: x.to(dtype)})
            if dtype == torch.float32 and x.dtype == torch.bfloat16 and op != "attention.write_cache":  # which rounds nothing
                with registry.before_rounding():
                    function, operands, keywords = CALLS[op]
                    function(*(operands | {name: x.float()}).values(), **keywords)


@pytest.mark.parametrize("op", CALLS)
def test_what_is_no_tensor_is_refused(op):
    names = list(CALLS[op][1])
    for name in names[1:]:
        if (op, name) != ("matmul.linear", "bias"):
            with pytest.raises(ContractError, match=rf"op {op}: {name}: expected a tensor of torch.*, found float 0.7"):
                call(op, **{name: 0.7})


OTHER_SHAPES = [
    ("matmul.linear", dict(weight=bf16(5, 3)), "x has K = 4, weight has K = 3"),
    ("matmul.linear", dict(weight=bf16(4)), r"weight: expected shape \[N, K\], found \[4\]"),
    ("matmul.linear", dict(bias=bf16(4)), r"bias: expected shape \[5\], found \[4\]"),
    ("matmul.row_parallel_linear", dict(weight=bf16(5, 8)), "x has K = 16, weight has K = 8"),
    ("matmul.lm_head", dict(x=torch.tensor(1.0).bfloat16()), r"x: expected shape \[..., T, K\], found \[\]"),
    ("matmul.linear", dict(x=bf16(4)), r"x: expected shape \[..., T, K\], found \[4\]"),
    ("moe.route", dict(logits=fp32(4)), r"logits: expected shape \[T, E\], found \[4\]"),
    ("moe.dispatch", dict(weights=fp32(2, 2)), r"weights: expected shape \[3, k\], found \[2, 2\]"),
    ("moe.dispatch", dict(experts=CHOSEN.int()), "experts: expected torch.int64, found torch.int32"),
    ("moe.expert_mlp", dict(experts=CHOSEN.int()), "experts: expected torch.int64, found torch.int32"),
    ("moe.expert_mlp", dict(experts=CHOSEN[:2]), r"experts: expected shape \[3, k\], found \[2, 2\]"),
    ("moe.expert_mlp", dict(gate_up=bf16(2, 6, 3)), r"gate_up: expected shape \[E', 2 F, 4\], found \[2, 6, 3\]"),
    ("moe.expert_mlp", dict(gate_up=[bf16(6, 4), bf16(6, 3)]), r"gate_up: expected shape \[6, 4\], found \[6, 3\]"),
    ("moe.expert_mlp", dict(gate_up=[bf16(6, 3)] * 2), r"gate_up: expected shape \[2 F, 4\], found \[6, 3\]"),
    ("moe.expert_mlp", dict(gate_up=[]), "gate_up: expected the matrices of one expert or more, found none"),
    ("moe.expert_mlp", dict(down=bf16(0, 4, 3)), "down: expected the matrices of one expert or more, found none"),
    ("moe.expert_mlp", dict(down=bf16(2, 4, 6)), r"down: expected shape \[E', 4, 3\], found \[2, 4, 6\]"),
    ("moe.expert_mlp", dict(down=bf16(3, 4, 3)), "down: expected the matrices of 2 experts, as in gate_up, found 3"),
    ("moe.combine", dict(weights=fp32(3, 3)), r"weights: expected shape \[3, 2\], found \[3, 3\]"),
    ("moe.combine", dict(experts=CHOSEN.int()), "experts: expected torch.int64, found torch.int32"),
    ("moe.combine", dict(shared=bf16(2, 4)), r"shared: expected shape \[3, 4\], found \[2, 4\]"),
    ("sampling.draw", dict(logprobs=fp32(2, 8)), "generators: expected one for each of 2 rows, or None, found 3"),
    ("sampling.split_greedy", dict(temperature=torch.tensor(1.0)), r"temperature: expected shape \[T\], found \[\]"),
    ("sampling.first_maximum", dict(logits=fp32(8)), r"logits: expected shape \[T, V\], found \[8\]"),
    ("attention.write_cache", dict(slot_mapping=IDS[:2]), r"slot_mapping: expected shape \[3\], found \[2\]"),
    ("attention.write_cache", dict(slot_mapping=IDS.int()), "slot_mapping: expected torch.int64, found torch.int32"),
    ("moe.router_logits", dict(weight=bf16(5, 3)), "x has K = 4, weight has K = 3"),
    ("norm.rms_norm", dict(weight=bf16(3)), r"weight: expected shape \[4\], found \[3\]"),
    ("norm.residual_add", dict(residual=bf16(1, 4)), r"residual: expected shape \[3, 4\], found \[1, 4\]"),
    ("norm.add_rms_norm", dict(residual=bf16(4)), r"residual: expected shape \[3, 4\], found \[4\]"),
    ("norm.gated_rms_norm", dict(gate=bf16(3, 1)), r"gate: expected shape \[3, 4\], found \[3, 1\]"),
    ("activation.silu_mul", dict(gate_up=bf16(3, 5)), r"gate_up: expected shape \[..., 2 F\], found \[3, 5\]"),
    ("activation.sigmoid_gate", dict(gate=bf16(2, 4)), r"gate: expected a shape that broadcasts to \[3, 4\], found \[2, 4\]"),
    ("embedding.embedding", dict(ids=IDS[None]), r"ids: expected shape \[T\], found \[1, 3\]"),
    ("rope.apply_rope", dict(cos=fp32(2, 2)), r"cos: expected shape \[3, rotary_dim / 2\], found \[2, 2\]"),
    ("rope.apply_rope", dict(sin=fp32(3, 1)), r"sin: expected shape \[3, 2\], found \[3, 1\]"),
    ("rope.apply_rope", dict(cos=fp32(3, 3), sin=fp32(3, 3)), "at most 2 angles for heads of 4 channels, found 3"),
    ("attention.varlen", dict(k=bf16(2, 1, 4)), r"k: expected shape \[3, G, 4\], found \[2, 1, 4\]"),
    ("attention.varlen", dict(v=bf16(3, 2, 4)), r"v: expected shape \[3, 1, 4\], found \[3, 2, 4\]"),
    ("attention.varlen", dict(cu_seqlens=CU[None]), r"cu_seqlens: expected shape \[B \+ 1\], found \[1, 2\]"),
    ("attention.varlen", dict(cu_seqlens=CU.long()), "cu_seqlens: expected torch.int32, found torch.int64"),
    ("attention.paged", dict(block_table=CU), r"block_table: expected shape \[B, max_pages\], found \[2\]"),
    ("attention.paged", dict(block_table=CU[None].long()), "block_table: expected torch.int32, found torch.int64"),
    ("attention.paged", dict(seq_lens=CU), r"seq_lens: expected shape \[1\], found \[2\]"),
    ("attention.paged", dict(seq_lens=torch.tensor([33]).int()), "seq_lens: expected at most the 32 tokens .* found 33"),
    ("attention.paged", dict(query_start_loc=CU[:1]), r"query_start_loc: expected shape \[2\], found \[1\]"),
    ("attention.paged", dict(block_table=torch.zeros(1, 4).int()[:, ::2]), r"block_table: expected entries beside .* strides \[4, 2\]"),
    ("attention.paged", dict(query_start_loc=torch.arange(3).int()[::2]), r"query_start_loc: expected entries beside .* strides \[2\]"),
    ("logprob.scale_by_temperature", dict(temperature=fp32(2)), r"temperature: expected a scalar or \[3\], found shape \[2\]"),
    ("logprob.log_softmax", dict(logits=fp32(8)), r"logits: expected shape \[T, V\], found \[8\]"),
    ("logprob.token_logprob", dict(tokens=IDS[:2]), r"tokens: expected shape \[3\], found \[2\]"),
]


@pytest.mark.parametrize("op,instead,message", OTHER_SHAPES, ids=[f"{op}-{'-'.join(instead)}" for op, instead, _ in OTHER_SHAPES])
def test_another_shape_is_refused(op, instead, message):
    with pytest.raises(ContractError, match=message) as error:
        call(op, **instead)
    assert f"op {op}: " in str(error.value)


def test_a_block_of_no_entries_is_refused():
    for op in ("logprob.log_softmax", "logprob.token_logprob"):
        function, operands, _ = CALLS[op]
        with pytest.raises(ContractError, match=f"op {op}: vocab_block: expected 1 or more, found 0"):
            function(*operands.values(), vocab_size=8, vocab_block=0)


def test_pages_of_another_dtype_or_head_size_are_refused():
    table, new = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    for cache, message in ((fp32(2, 16, 1, 4), "key_cache: expected torch.bfloat16"), (bf16(2, 16, 1, 8), r"key_cache: expected shape .*, 4\]")):
        with pytest.raises(ContractError, match=f"op attention.paged: {message}"):
            contextvars.Context().run(attention.paged, bf16(1, 2, 4), cache, cache, table, new, torch.tensor([0, 1]).int(), **SETTINGS)


def test_a_check_costs_no_synchronisation():
    """It reads attributes alone: tensors without data pass it, and meet the device that they lie on."""
    from isoexec.ops.matmul.checks import check_operands

    check_operands("matmul.linear", *(torch.empty(n, 4, dtype=torch.bfloat16, device="meta") for n in (3, 5)))
