"""Whole decoder layers of Qwen3.5 MoE against native kernels composed the same way: ``python -m bench.layers --native DIR [--commit HASH]``.

Ours are the layers of isoexec/models with the callbacks that the runtimes give them. Native is what a stock stack runs between the same weights:
cuBLAS; for rollout vLLM's norm, rotary and router kernels, fused experts and Gated DeltaNet kernels, FlashAttention 3 with its default splits; for
training torch's norm, attention and grouped products and flash-linear-attention. Where vLLM compiles an elementwise step (gates, the shared
expert's scale), and for silu, our kernel stands on both sides. DIR as in bench/gdn.py, with the compiled extensions of bench/native_vllm.py.
"""

from __future__ import annotations

import sys

import torch
import triton
from torch.nn import functional as F

from bench import gdn_native, native_moe, native_vllm, table
from isoexec.contract import Numerics
from isoexec.models import qwen3_5, qwen3_5_moe, qwen3_moe
from isoexec.ops import activation, attention, gdn, rope
from isoexec.ops.attention import fa3

D, EXPERTS, WIDTH, TOP, EPS = 2048, 256, 512, 8, 1e-6
H, HV, S = 16, 32, 128  # Gated DeltaNet: key heads, value heads, size of both
Q, G, K, ROTARY = 16, 2, 256, 64  # attention: query and key heads, size, rotated channels
CHANNELS, VALUES = (2 * H + HV) * S, HV * S
SCALE, PAGE, CONTEXT, SEQUENCES = K**-0.5, 16, 4096, (2048,) * 5


def randn(*shape, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def matrix(n, k):
    return randn(n, k, scale=k**-0.5)


def split_gdn(qkvz, ba):
    qkv, z = qkvz.split((CHANNELS, VALUES), -1)
    b, a = ba.chunk(2, -1)
    return qkv, z.unflatten(-1, (HV, S)), b, a


def split_attention(y):
    q, gate, k, v = y.split((Q * K, Q * K, G * K, G * K), -1)
    return *(x.unflatten(-1, (Q, K)) for x in (q, gate)), *(x.unflatten(-1, (G, K)) for x in (k, v))


def parameters(kind):
    """A layer of isoexec/models; its tensors serve native too."""
    if kind == "GDN":
        mixer = qwen3_5.GatedDeltaNet(
            (matrix(CHANNELS + VALUES, D), matrix(2 * HV, D)), split_gdn, randn(CHANNELS, 4, scale=0.3), torch.rand(HV, device="cuda"),
            torch.rand(HV, device="cuda"), torch.rand(S, device="cuda").bfloat16(), matrix(D, VALUES), S, S, EPS,
        )  # fmt: skip
    else:
        mixer = qwen3_5.GatedAttention(matrix(2 * (Q + G) * K, D), split_attention, randn(K, scale=0.1), randn(K, scale=0.1), matrix(D, Q * K), EPS)
    experts = randn(EXPERTS, 2 * WIDTH, D, scale=D**-0.5), randn(EXPERTS, D, WIDTH, scale=WIDTH**-0.5)
    mlp = qwen3_moe.SparseMLP(matrix(EXPERTS, D), *experts, TOP, True)
    shared = qwen3_5_moe.SharedExpert(matrix(2 * WIDTH, D), matrix(D, WIDTH), matrix(1, D))
    return qwen3_5_moe.Qwen35MoELayer(randn(D, scale=0.1), mixer, randn(D, scale=0.1), mlp, shared, EPS)


def leaves_of(layer):
    """Its tensors, depth first."""
    for value in layer:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from leaves_of(value)


class Stage:
    """Where the states of one stage lie. ``rows``: of the batch."""

    def __init__(self, kind, stage):
        self.kind, self.stage = kind, stage
        self.lengths = (1,) * 256 if stage == "decode" else SEQUENCES
        self.rows, self.n = sum(self.lengths), len(self.lengths)
        self.cu = torch.tensor([0, *self.lengths]).cumsum(0).int().cuda()
        self.slots = torch.arange(self.n, device="cuda").int() + 1
        # Sequences that decode together stand anywhere in a chunk and in a page.
        decoding = CONTEXT - PAGE + torch.arange(self.n) % PAGE
        positions = decoding if stage == "decode" else torch.cat([torch.arange(n) for n in self.lengths])
        self.positions = positions.cuda()
        if kind == "GDN":
            self.plan = gdn.Plan(list(self.lengths), Numerics().gdn_chunk, device="cuda")
            self.windows = torch.zeros(self.n + 1, 3, CHANNELS, device="cuda", dtype=torch.bfloat16)
            self.pool = gdn.StatePool.empty(self.n + 1, H, HV, S, S, Numerics().gdn_chunk, "cuda")
            for field in self.pool.tensors():
                field.zero_()
            self.states = torch.zeros(self.n + 1, HV, S, S, device="cuda")
        elif stage == "decode":
            pages = self.n * CONTEXT // PAGE
            self.caches = [randn(pages, PAGE, G, K) for _ in range(2)]
            self.block_table = torch.randperm(pages, device="cuda").int().view(self.n, -1)
            self.lens = self.positions.int() + 1
            self.place = self.block_table[:, -1].long() * PAGE + self.positions % PAGE
        if kind != "GDN":
            self.rope = rope.rope_table(self.positions, ROTARY, 1e7)
            every = rope.rope_table(torch.arange(CONTEXT, device="cuda"), ROTARY, 1e7)
            self.cos_sin = torch.cat(every, -1).bfloat16()

    def ours(self, layer, numerics):
        """(x, residual) -> (x, residual)"""
        if self.kind != "GDN":
            return lambda x, r: qwen3_5_moe.attention_layer(x, r, layer, self.rope, self.attend, numerics)
        positions = self.positions.int()
        if self.stage == "decode":
            convolve = lambda y, w: gdn.conv1d_step(y, w, self.windows, self.slots)  # noqa: E731
            mix = lambda *x: gdn.cpr_wy_decode(*(t.contiguous() for t in x), self.pool, self.slots, positions)  # noqa: E731
        elif self.stage == "prefill":
            convolve = lambda y, w: gdn.conv1d(y, w, self.plan)[0]  # noqa: E731
            mix = lambda *x: gdn.cpr_wy_prefill(*(t.contiguous() for t in x), self.plan, self.pool, self.slots)  # noqa: E731
        else:
            convolve = lambda y, w: gdn.conv1d(y, w, self.plan)[0]  # noqa: E731
            mix = lambda *x: gdn.cpr_wy(*x, self.plan)  # noqa: E731
        return lambda x, r: qwen3_5_moe.gdn_layer(x, r, layer, convolve, mix, numerics)

    def attend(self, q, k, v):
        if self.stage != "decode":
            return attention.varlen(q, k, v, self.cu, scale=SCALE, kv_block=64, longest=max(self.lengths))
        attention.write_cache(k, v, *self.caches, self.place)
        return attention.paged(q, *self.caches, self.block_table, self.lens, self.cu, scale=SCALE, kv_block=64, longest=1)

    def native(self, layer, moe):
        return (NativeTrainer if self.stage == "trainer forward + backward" else NativeEngine)(self, layer, moe)


class NativeEngine:
    def __init__(self, stage, layer, moe):
        self.s, self.layer, self.moe = stage, layer, moe
        if stage.kind == "GDN" and stage.stage == "prefill":
            from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

            self.fresh = torch.zeros(stage.n, dtype=torch.bool, device="cuda")
            self.tables = type("Tables", (), {})()
            names = "nums_dict", "batch_ptr", "token_chunk_offset_ptr"
            for name, value in zip(names, compute_causal_conv1d_metadata(torch.tensor(stage.plan.offsets), device="cuda")):
                setattr(self.tables, name, value)

    def __call__(self, x, residual):
        x = native_vllm.fused_add_rms_norm(x, residual, self.layer.input_norm, EPS)
        x = self.delta_net(x) if self.s.kind == "GDN" else self.attention(x)
        x = native_vllm.fused_add_rms_norm(x, residual, self.layer.post_attention_norm, EPS)
        return self.experts(x), residual

    def delta_net(self, x):
        m, s = self.layer.mixer, self.s
        qkv, z, b, a = split_gdn(*(F.linear(x, w) for w in m.in_proj))
        if s.stage == "decode":
            from vllm.model_executor.layers.fla.ops.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode as packed
            from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

            y = causal_conv1d_update(qkv, s.windows.transpose(1, 2), m.conv, None, "silu", conv_state_indices=s.slots)
            o = torch.empty(s.n, 1, HV, S, dtype=x.dtype, device=x.device)
            packed(y.contiguous(), a.contiguous(), b.contiguous(), m.A_log, m.dt_bias, S**-0.5, s.states, o, s.slots, use_qk_l2norm_in_kernel=True)
        else:
            from vllm.model_executor.layers.fla.ops import chunk_gated_delta_rule
            from vllm.model_executor.layers.fla.ops.fused_gdn_prefill_post_conv import fused_post_conv_prep
            from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

            y = causal_conv1d_fn(qkv.T, m.conv, None, s.windows.transpose(1, 2), s.cu, cache_indices=s.slots, has_initial_state=self.fresh,
                                 metadata=self.tables)  # fmt: skip
            q, k, v, g, beta = fused_post_conv_prep(y.T, a.contiguous(), b.contiguous(), m.A_log, m.dt_bias, H, S, S)
            o = chunk_gated_delta_rule(q[None], k[None], v[None], g=g[None], beta=beta[None], cu_seqlens=s.cu, initial_state=s.states[1:],
                                       output_final_state=True)[0]  # fmt: skip
        return F.linear(gdn_native.gated_norm(o, z, m.norm).view(len(x), -1), m.out_proj)

    def attention(self, x):
        m, s = self.layer.mixer, self.s
        q, gate, k, v = split_attention(F.linear(x, m.qkv))
        q, k = native_vllm.rms_norm(q.contiguous(), m.q_norm, EPS), native_vllm.rms_norm(k.contiguous(), m.k_norm, EPS)
        native_vllm.rotate(s.positions, q.view(len(x), -1), k.view(len(x), -1), K, s.cos_sin)
        where = dict(cu_seqlens_k=s.cu, longest_q=max(s.lengths), longest_k=max(s.lengths))
        if s.stage == "decode":
            attention.write_cache(k, v, *s.caches, s.place)
            k, v, where = *s.caches, dict(longest_q=1, longest_k=CONTEXT, seq_lens=s.lens, block_table=s.block_table)
        o = fa3.attend(q, k, v, s.cu, SCALE, splits=0, **where)[0]
        return F.linear(activation.sigmoid_gate(o, gate).flatten(1), m.o)

    def experts(self, x):
        mlp, shared = self.layer.mlp, self.layer.shared
        weights, chosen = native_moe.topk_softmax(F.linear(x, mlp.router), TOP)
        routed = native_moe.fused_experts(self.moe, x, mlp.gate_up, mlp.down, weights, chosen)
        value = F.linear(native_vllm.silu_and_mul(F.linear(x, shared.gate_up)), shared.down)
        return routed + activation.sigmoid_gate(value, F.linear(x, shared.gate))


class NativeTrainer:
    def __init__(self, stage, layer, moe):
        self.s, self.layer = stage, layer

    def __call__(self, x, residual):
        residual = residual + x
        x = F.rms_norm(residual, (D,), self.layer.input_norm, EPS)
        x = self.delta_net(x) if self.s.kind == "GDN" else self.attention(x)
        residual = residual + x
        return self.experts(F.rms_norm(residual, (D,), self.layer.post_attention_norm, EPS)), residual

    def delta_net(self, x):
        from fla.modules.conv.causal_conv1d import causal_conv1d
        from fla.modules.fused_norm_gate import rms_norm_gated
        from fla.modules.l2norm import l2norm
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        m, cu = self.layer.mixer, self.s.cu
        qkv, z, b, a = split_gdn(*(F.linear(x, w) for w in m.in_proj))
        y = causal_conv1d(qkv[None].contiguous(), m.conv, activation="silu", cu_seqlens=cu)[0]
        q, k, v = (t.unflatten(-1, (-1, S)) for t in y.split((H * S, H * S, VALUES), -1))
        q, k = (l2norm(t.contiguous()).repeat_interleave(HV // H, 2) for t in (q, k))
        o, _ = chunk_gated_delta_rule(q, k, v.contiguous(), g=a[None].contiguous(), beta=b[None].contiguous(), cu_seqlens=cu, use_gate_in_kernel=True,
                                      use_beta_sigmoid_in_kernel=True, A_log=m.A_log, dt_bias=m.dt_bias)  # fmt: skip
        return F.linear(rms_norm_gated(o[0], z.contiguous(), m.norm, None, "swish", eps=EPS).flatten(1), m.out_proj)

    def attention(self, x):
        m, n = self.layer.mixer, len(SEQUENCES)
        q, gate, k, v = split_attention(F.linear(x, m.qkv))
        q, k = (rope.apply_rope(F.rms_norm(t, (K,), w, EPS), *self.s.rope) for t, w in ((q, m.q_norm), (k, m.k_norm)))
        q, k, v = (t.unflatten(0, (n, -1)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
        return F.linear(activation.sigmoid_gate(o, gate).flatten(1), m.o)

    def experts(self, x):
        mlp, shared = self.layer.mlp, self.layer.shared
        weights, chosen = F.linear(x, mlp.router).float().softmax(-1).topk(TOP)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        ones = torch.ones_like(chosen).flatten()
        ends = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device).index_add_(0, chosen.flatten(), ones).cumsum(0).int()
        h = activation.silu_mul(torch._grouped_mm(x[order // TOP], mlp.gate_up.mT, offs=ends))
        rows = torch._grouped_mm(h, mlp.down.mT, offs=ends)
        values = torch.empty_like(rows).index_copy(0, order, rows).view(*chosen.shape, D)
        routed = (values * weights.unsqueeze(-1).to(values.dtype)).sum(1)
        value = F.linear(activation.silu_mul(F.linear(x, shared.gate_up)), shared.down)
        return routed + activation.sigmoid_gate(value, F.linear(x, shared.gate))


def with_gradient(function, layer, rows):
    leaves = [t.requires_grad_() for t in leaves_of(layer)]
    inputs = [randn(rows, D).requires_grad_() for _ in range(2)]
    grads = [randn(rows, D) for _ in range(2)]
    return lambda: torch.autograd.grad(function(*inputs), [*inputs, *leaves], grads)


def without(function, rows):
    x, residual = randn(rows, D), randn(rows, D)

    @torch.no_grad()
    def run():
        # A native norm works in place; the copy of the input that both sides take keeps every run the same.
        return function(x.clone(), residual.clone())

    return run


def times(*functions):
    """(medians in us, clock): replayed graphs, or events for all where one cannot be captured."""
    try:
        return [1e3 * triton.testing.do_bench_cudagraph(f, rep=30, return_mode="median") for f in functions], "graph", ""
    except Exception as error:
        torch.cuda.synchronize()
        why = f"no graph: {str(error).splitlines()[0][:100]}"
        return [1e3 * triton.testing.do_bench(f, warmup=20, rep=100, return_mode="median") for f in functions], "events", why


def main():
    options = table.options(__doc__, "layers and stages whose name holds this word")
    torch.manual_seed(0)
    if options.native:
        native_vllm.load(options.native)
        gdn_native.tune()
    out, moe = table.Table(options.out, options.commit, gdn_native.PACKAGES), native_moe.load(options.native) if options.native else None
    for kind in ("attention", "GDN"):
        for name in ("decode", "prefill", "trainer forward + backward"):
            if options.only in f"{kind} {name}":
                row(out, kind, name, moe)
                torch.cuda.empty_cache()


def row(out, kind, name, moe):
    stage, layer = Stage(kind, name), parameters(kind)
    wrap = with_gradient if name.startswith("trainer") else lambda function, _, rows: without(function, rows)
    run = [wrap(stage.ours(layer, Numerics(row_leaves=leaves)), layer, stage.rows) for leaves in (1, 8)]
    native, label, why = None, "", ""
    try:
        native = wrap(stage.native(layer, moe), layer, stage.rows)
        native()
        label = "torch, fla" if name.startswith("trainer") else "vLLM 0.23.0 kernels, cuBLAS"
    except Exception as error:
        native, why = None, f"native: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
        print(why, file=sys.stderr, flush=True)
    found, clock, note = times(*run, *([native] if native else []))
    shape = "256 sequences" if name == "decode" else "5x2048"
    for leaves, ours in zip((1, 8), found):
        out.add(f"decoder layer, {kind} + MoE, G={leaves}", name, shape, ours, found[2] if native else None, label,
                target=1.0 if leaves == 1 else None, clock=clock, note="; ".join(filter(None, (note, why))))  # fmt: skip


if __name__ == "__main__":
    main()
