"""Times the GPU ops against the native kernels in the same run: ``python -m bench.ops [--out FILE] [--only WORD[,WORD]]``.

Medians over rotating inputs (so that small cases do not sit in the L2 cache) of replayed CUDA graphs, and of rounds in which the sides take
turns. ``native`` is what a stock stack runs: vLLM's kernels where ``--native`` names a folder with its extensions, else torch's fused or eager
kernels; cuBLAS; the best of torch's attentions. For purely memory-bound ops without such a kernel it is a copy of as many bytes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import sys
import time

import torch
import triton
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import gdn_native, native_moe, native_vllm, table
from isoexec.ops import activation, attention, embedding, logprob, matmul, moe, norm, rope, sampling
from isoexec.ops.attention import fa3
from isoexec.ops.logprob import of_hidden
from isoexec.ops.matmul import triton as portable_matmul

EPS = 1e-6
#: In which the sides take turns: at its power limit a GPU's clock moves a single comparison by a fifth.
ROUNDS = 3


def randn(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def sets(make, bytes_each):
    """Enough input sets that a pass over them does not fit the L2 cache."""
    return [make() for _ in range(max(1, min(16, (256 << 20) // max(bytes_each, 1))))]


def median_us(function, inputs) -> float:
    """Of replayed CUDA graphs, backward included: the device's time, without the host's work between launches."""
    ring = itertools.cycle(inputs)
    torch.cuda.synchronize()  # the capture runs on a stream of its own, which does not wait for the inputs
    return 1e3 * triton.testing.do_bench_cudagraph(lambda: function(*next(ring)), rep=20, return_mode="median")


def steady_us(function, inputs) -> float:
    """Of a call among many, for what no graph captures: the host's time where that is longer than the device's."""
    ring, calls, times = itertools.cycle(inputs), 50, []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            function(*next(ring))
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began) / calls)
    return min(times[1:])


def copy_of(bytes_moved):
    """A device copy that reads and writes ``bytes_moved`` in all."""
    size = bytes_moved // 4
    return lambda: (torch.empty(size, dtype=torch.uint16, device="cuda"), torch.empty(size, dtype=torch.uint16, device="cuda"))


class Cases:
    """Times cases whose op's name holds one of the words of ``only``, and tables them. ``vllm``: whether vLLM's kernels are at hand."""

    def __init__(self, only, table, vllm=False):
        self.only, self.table, self.vllm, self.taken = only.split(","), table, vllm, {}

    def wants(self, *ops):
        """Whether any of ``ops`` is asked for: inputs of the others need not be made."""
        return any(word in op for word in self.only for op in ops)

    def add(self, op, case, ours, native, inputs, label="", native_inputs=None, target=None, note="", groups=(), clock=median_us):
        """``native``: a function, or several by name, of which the fastest counts; ``groups``: means that the case enters besides its op's;
        ``clock``: ``median_us`` or ``steady_us``."""
        if not self.wants(op):
            return
        natives = dict(native) if isinstance(native, dict) else {label: native}
        try:
            rounds = []
            for _ in range(ROUNDS):
                rounds.append({"": clock(ours, inputs)})
                for name, function in list(natives.items()):
                    try:
                        rounds[-1][name] = clock(function, native_inputs or inputs)
                    except Exception as error:
                        note = "; ".join(filter(None, (note, f"{name}: {type(error).__name__}")))
                        natives.pop(name)
            ours_us, found = statistics.median(each[""] for each in rounds), {n: statistics.median(each[n] for each in rounds) for n in natives}
            label = min(found, key=found.get)
        except Exception as error:  # a case that fails is reported, the others still count
            print(f"{op} {case}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return
        note = "; ".join(filter(None, (note, *(f"{name} {us:.1f} us" for name, us in found.items() if name != label))))
        stage, shape = "forward + backward" if "gradient" in case else "forward", case.removesuffix(" with gradient").removesuffix(",")
        for group in (op, *groups):
            self.taken.setdefault((group, stage), []).append((ours_us, found[label]))
        self.table.add(op, stage, shape, ours_us, found[label], label, target=target, note=note,
                       clock="graph" if clock is median_us else "host")  # fmt: skip

    def mean(self, name, stage, target, *ops):
        """A row of geometric means over all cases so far of ``ops`` (of ``name`` by default)."""
        times = [pair for op in ops or (name,) for pair in self.taken.get((op, stage), ())]
        if times:
            ours, native = (math.exp(sum(math.log(t) for t in side) / len(side)) for side in zip(*times))
            self.table.add(name, stage, f"geometric mean of {len(times)}", ours, native, "of the rows", target=target, clock="graph")


def norms(cases):
    for T, D in ((16, 2048), (8192, 2048), (8192, 4096)):
        w, size = randn(D), 2 * T * D
        xs = sets(lambda: (randn(T, D),), 2 * size)
        natives = {"F.rms_norm": lambda x: F.rms_norm(x, (D,), w, EPS)}
        if cases.vllm:
            natives["vLLM rms_norm"] = lambda x: native_vllm.rms_norm(x, w, EPS)
        cases.add("norm.rms_norm", f"{T}x{D}", lambda x: norm.rms_norm(x, w, EPS), natives, xs)
        pairs = sets(lambda: (randn(T, D), randn(T, D)), 4 * size)
        if cases.vllm:
            cases.add("norm.add_rms_norm", f"{T}x{D}", lambda x, r: norm.add_rms_norm(x, r, w, EPS),
                      lambda x, r: native_vllm.fused_add_rms_norm(x, r, w, EPS), pairs, "vLLM fused_add_rms_norm")  # fmt: skip
        else:
            cases.add("norm.add_rms_norm", f"{T}x{D}", lambda x, r: norm.add_rms_norm(x, r, w, EPS), lambda a, b: b.copy_(a), pairs,
                      "copy of the same bytes", sets(copy_of(4 * size), 4 * size))  # fmt: skip
    w, T, H = randn(128), 8192, 16
    natives = {"F.rms_norm": lambda x: F.rms_norm(x, (128,), w, EPS)}
    if cases.vllm:
        natives["vLLM rms_norm"] = lambda x: native_vllm.rms_norm(x, w, EPS)
    cases.add("norm.rms_norm", "heads 8192x16x128", lambda x: norm.rms_norm(x, w, EPS), natives, sets(lambda: (randn(T, H, 128),), 1 << 26))
    x, w, g = randn(8192, 2048).requires_grad_(), randn(2048).requires_grad_(), randn(8192, 2048)
    cases.add("norm.rms_norm", "8192x2048 with gradient", lambda: torch.autograd.grad(norm.rms_norm(x, w, EPS), (x, w), g),
              lambda: torch.autograd.grad(F.rms_norm(x, (2048,), w, EPS), (x, w), g), [()], "F.rms_norm")  # fmt: skip
    bytes_moved = 3 * 2 * 8192 * 32 * 128
    w, pairs = randn(128), sets(lambda: (randn(8192, 32, 128), randn(8192, 32, 128)), bytes_moved)
    ours = lambda x, z: norm.gated_rms_norm(x, z, w, EPS)  # noqa: E731
    if cases.vllm:
        cases.add("norm.gated_rms_norm", "8192x32x128", ours, lambda x, z: gdn_native.gated_norm(x, z, w), pairs, "vLLM rmsnorm_fn")
    else:
        cases.add("norm.gated_rms_norm", "8192x32x128", ours, lambda a, b: b.copy_(a), pairs, "copy of the same bytes",
                  sets(copy_of(bytes_moved), bytes_moved))  # fmt: skip


def elementwise(cases):
    for T in (16, 8192):
        moved = 3 * 2 * T * 6144
        xs = sets(lambda: (randn(T, 12288),), moved)
        if cases.vllm:
            cases.add("activation.silu_mul", f"{T}x6144", activation.silu_mul, native_vllm.silu_and_mul, xs, "vLLM silu_and_mul")
        else:
            cases.add("activation.silu_mul", f"{T}x6144", activation.silu_mul, lambda a, b: b.copy_(a), xs, "copy of the same bytes",
                      sets(copy_of(moved), moved))  # fmt: skip
        positions = torch.arange(T, device="cuda")
        cos, sin = rope.rope_table(positions, 128, 1e6)
        moved, cos_sin = 4 * T * 16 * 128, torch.cat((cos, sin), -1).bfloat16()
        xs = sets(lambda: (randn(T, 16, 128),), moved)
        if cases.vllm:
            cases.add("rope.apply_rope", f"{T}x16x128", lambda x: rope.apply_rope(x, cos, sin),
                      lambda x: native_vllm.rotate(positions, x.view(T, -1), None, 128, cos_sin), xs, "vLLM rotary_embedding, in place")  # fmt: skip
        else:
            cases.add("rope.apply_rope", f"{T}x16x128", lambda x: rope.apply_rope(x, cos, sin), lambda a, b: b.copy_(a), xs, "copy of the same bytes",
                      sets(copy_of(moved), moved))  # fmt: skip
        moved = 3 * 2 * T * 16 * 256
        cases.add("activation.sigmoid_gate", f"{T}x16x256", activation.sigmoid_gate, lambda a, b: b.copy_(a),
                  sets(lambda: (randn(T, 16, 256), randn(T, 16, 256)), moved), "copy of the same bytes", sets(copy_of(moved), moved))  # fmt: skip
    x, g = randn(8192, 12288).requires_grad_(), randn(8192, 6144)

    def eager(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    cases.add("activation.silu_mul", "8192x6144 with gradient", lambda: torch.autograd.grad(activation.silu_mul(x), x, g),
              lambda: torch.autograd.grad(eager(x), x, g), [()], "eager torch")  # fmt: skip
    w, ids, g = randn(151936, 2048).requires_grad_(), torch.randint(0, 151936, (8192,), device="cuda"), randn(8192, 2048)
    cases.add("embedding.embedding", "8192 of 151936x2048 with gradient", lambda: torch.autograd.grad(embedding.embedding(ids, w), w, g),
              lambda: torch.autograd.grad(F.embedding(ids, w), w, g), [()], "F.embedding")  # fmt: skip


def logprobs(cases):
    V = 151936
    for T in (16, 1024):
        xs = sets(lambda: (randn(T, V, dtype=torch.float32, scale=4.0), torch.randint(0, V, (T,), device="cuda")), 4 * T * V)
        native = lambda x, t: torch.log_softmax(x, -1).gather(1, t[:, None])  # noqa: E731
        ours = lambda x, t: logprob.token_logprob(x, t, vocab_size=V, vocab_block=64)  # noqa: E731
        cases.add("logprob.token_logprob", f"{T}x{V}", ours, native, xs, "log_softmax, gather")
        cases.add("logprob.log_softmax", f"{T}x{V}", lambda x, t: logprob.log_softmax(x, vocab_size=V, vocab_block=64),
                  lambda x, t: torch.log_softmax(x, -1), xs, "torch.log_softmax")  # fmt: skip
    x, t, g = xs[0][0].requires_grad_(), xs[0][1], randn(1024, dtype=torch.float32)
    cases.add("logprob.token_logprob", f"1024x{V} with gradient", lambda: torch.autograd.grad(ours(x, t), x, g),
              lambda: torch.autograd.grad(native(x, t).squeeze(1), x, g), [()], "log_softmax, gather")  # fmt: skip
    temperature = torch.tensor(0.7, device="cuda")
    if cases.wants("head and logprob"):
        head(cases, 4096, 248320, 2048, temperature)
    cases.add("logprob.scale_by_temperature", f"1024x{V}", lambda x, t: logprob.scale_by_temperature(x, temperature),
              lambda x, t: x / temperature, [(x.detach(), t)], "torch division")  # fmt: skip


def head(cases, T, V, D, temperature):
    """Logprobs from hidden states, which hold tiles of the logits, against logits, log-softmax and gather."""
    x, w, t, g = randn(T, D), randn(V, D, scale=D**-0.5), torch.randint(0, V, (T,), device="cuda"), torch.randn(T, device="cuda")
    leaves = [leaf.requires_grad_() for leaf in (x, w)]
    ours = lambda: of_hidden.of_hidden(x, w, t, temperature, vocab_size=V, vocab_block=64)  # noqa: E731
    native = lambda: torch.log_softmax(F.linear(x, w).float() / temperature, -1).gather(1, t[:, None]).squeeze(1)  # noqa: E731
    note = f"tiles of {of_hidden.LOGIT_BYTES >> 20} MB; backward computes the logits once more"
    with torch.no_grad():  # as a score; a forward whose gradient is wanted keeps each row's maximum and sum, too
        cases.add("head and logprob", f"{T}x{V}x{D}", ours, native, [()], "cuBLAS, log_softmax, gather", note=note)
    cases.add("head and logprob", f"{T}x{V}x{D} with gradient", lambda: torch.autograd.grad(ours(), leaves, g),
              lambda: torch.autograd.grad(native(), leaves, g), [()], "cuBLAS, log_softmax, gather", note=note)  # fmt: skip
    torch.cuda.empty_cache()


def draws(cases):
    """From logprobs, a generator a row, against vLLM's draw from probabilities, from which it takes the noise with one generator or with as many."""
    V = 151936
    for T in (16, 256):
        rows = randn(T, V, dtype=torch.float32, scale=2.0).log_softmax(-1)
        generators = [torch.Generator("cuda").manual_seed(row) for row in range(T)]

        def native(probabilities, seeded):
            noise = torch.empty_like(probabilities).exponential_()
            for row, generator in enumerate(generators if seeded else ()):
                noise[row].exponential_(generator=generator)
            return (probabilities / noise).argmax(-1)

        natives = {"as vLLM, unseeded": lambda x: native(x, False), "as vLLM, seeded": lambda x: native(x, True)}
        cases.add("sampling.draw", f"{T}x{V}", lambda x: sampling.draw(x, generators), natives, [(rows,)], native_inputs=[(rows.exp(),)],
                  clock=steady_us, note="host included")  # fmt: skip


def products(cases):
    for N, K in ((12288, 2048), (2048, 4096), (2048, 6144), (32768, 2048)):
        for M in (1, 16, 64, 256, 300, 512, 768, 1024, 2048, 8192):
            xs = sets(lambda: (randn(M, K), randn(N, K, scale=K**-0.5)), 2 * (M * K + N * K + M * N))
            case = f"{M}x{N}x{K}"
            if M not in (300, 512, 768, 2048):
                cases.add("matmul.linear", case, matmul.linear, F.linear, xs, "cuBLAS", target=1.08)
            if M in (1, 64, 1024, 8192):
                cases.add("matmul.linear (Triton)", case, lambda x, w: portable_matmul.product(x, w, torch.bfloat16), F.linear, xs, "cuBLAS")
            for G in (2, 4, 8) if N == 2048 else ():
                cases.add(f"matmul.row_parallel G={G}", case, lambda x, w: matmul.row_parallel_linear(x, w, leaves=G), F.linear, xs, "cuBLAS",
                          target=1.15)  # fmt: skip
    cases.mean("matmul.linear", "forward", 1.02)
    for N, K in ((12288, 2048), (2048, 6144)):
        x, w, g = randn(8192, K).requires_grad_(), randn(N, K, scale=K**-0.5).requires_grad_(), randn(8192, N)
        cases.add("matmul.linear", f"8192x{N}x{K} with gradient", lambda: torch.autograd.grad(matmul.linear(x, w), (x, w), g),
                  lambda: torch.autograd.grad(F.linear(x, w), (x, w), g), [()], "cuBLAS", target=1.08)  # fmt: skip
    w = randn(151936, 2048, scale=2048**-0.5)
    for M in (16, 1024):
        cases.add("matmul.lm_head", f"{M}x151936x2048", matmul.lm_head, lambda x, w: F.linear(x, w).float(), [(randn(M, 2048), w)], "cuBLAS, to fp32",
                  target=1.08)  # fmt: skip


def sdpa(B, S, backend=None):
    """torch's attention of B packed sequences of S tokens, by ``backend`` (its own choice by default)."""

    def run(q, k, v):
        q, k, v = (x.unflatten(0, (B, S)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    return run


def attentions(cases):
    for H, G, K in ((32, 8, 128), (16, 2, 256)):
        for B, S in ((4, 2048), (8, 2048), (1, 16384)):
            if cases.wants("attention.varlen"):
                packed_attention(cases, H, G, K, B, S)
            torch.cuda.empty_cache()
        if cases.wants("attention.paged"):
            decode(cases, H, G, K)
    cases.mean("attention.varlen", "forward + backward", 1.05)
    cases.mean("attention.paged, batch 16 and 256", "forward", 1.05)


def packed_attention(cases, H, G, K, B, S):
    cu = torch.arange(0, B * S + 1, S, dtype=torch.int32, device="cuda")
    make = lambda: tuple(randn(B * S, heads, K) for heads in (H, G, G))  # noqa: E731
    ours = lambda q, k, v: attention.varlen(q, k, v, cu, scale=K**-0.5, kv_block=64, longest=S)  # noqa: E731
    natives = {"torch SDPA": sdpa(B, S), "flash": sdpa(B, S, SDPBackend.FLASH_ATTENTION), "cuDNN": sdpa(B, S, SDPBackend.CUDNN_ATTENTION)}
    case = f"{B}x{S}, {H}/{G}x{K}"
    cases.add("attention.varlen", case, ours, natives, [make()])
    leaves, g = [x.requires_grad_() for x in make()], randn(B * S, H, K)

    def gradient(function):
        return lambda: torch.autograd.grad(function(*leaves), leaves, g)

    cases.add("attention.varlen", case + ", with gradient", gradient(ours), {name: gradient(f) for name, f in natives.items()}, [()], target=1.05)
    split = lambda splits: lambda q, k, v: fa3.attend(  # noqa: E731
        q, k, v, cu, K**-0.5, longest_q=S, longest_k=S, cu_seqlens_k=cu, splits=splits
    )
    if S > 4096:
        cases.add("attention.varlen, 8 splits of the keys", case, split(8), split(1), [make()], "one split",
                  note="what a split in every case would cost the trainer and prefill")  # fmt: skip


def decode(cases, H, G, K):
    """Decode, pages of 16, against the same kernel with its default number of splits, whose bits depend on the batch."""
    page = 16
    for B, context in ((256, 4096), (16, 4096), (4, 4096), (1, 4096), (256, 32768), (16, 32768), (4, 32768), (1, 32768)):
        pages = B * context // page
        caches = [torch.empty(pages, page, G, K, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2)]
        block_table = torch.randperm(pages, device="cuda").to(torch.int32).view(B, -1)
        lens = torch.full((B,), context, dtype=torch.int32, device="cuda")
        start = torch.arange(B + 1, dtype=torch.int32, device="cuda")
        q = randn(B, H, K)

        def ours(longest):
            return lambda: attention.paged(q, *caches, block_table, lens, start, scale=K**-0.5, kv_block=64, longest=longest)

        def native(splits=0):
            return lambda: fa3.attend(
                q, *caches, start, K**-0.5, longest_q=1, longest_k=context, seq_lens=lens, block_table=block_table, splits=splits
            )[0]

        case = f"{B} decodes at {context}, {H}/{G}x{K}"
        groups = ("attention.paged, batch 16 and 256",) if B >= 16 else ()
        cases.add("attention.paged", case + ", bound 1", ours(1), native(), [()], "FA3, default splits", groups=groups)
        if context == 32768 and B <= 16:
            cases.add("attention.paged, 8 splits of the keys", case, native(8), native(1), [()], "one split")
        caches = None


def experts(cases, native):
    """Hidden 2048, expert width 512, top 8: the whole MLP from chosen experts to the token's sum, and the router."""
    D, F_, k, groups = 2048, 512, 8, 8
    for E in (64, 256):
        gate_up, down = randn(E, 2 * F_, D, scale=D**-0.5), randn(E, D, F_, scale=F_**-0.5)
        for T in (16, 256, 4096, 16384):
            x, logits = randn(T, D), randn(T, E, dtype=torch.float32, scale=2.0)
            weights, chosen = moe.route(logits, top_k=k, renormalize=True)
            few = chosen.int()

            def ours():
                values = moe.expert_mlp(x, chosen, gate_up, down)
                return moe.combine(values, weights, chosen, num_experts=E, combine_groups=groups)

            if native is not None:
                cases.add("moe.expert_mlp + combine", f"{T} tokens, {E} experts", ours,
                          lambda: native_moe.fused_experts(native, x, gate_up, down, weights, few), [()], "vLLM 0.23.0 fused_experts, Triton", target=1.1,
                          note="native with our silu_mul between its products")  # fmt: skip
                cases.add("moe.route", f"{T}x{E}", lambda: moe.route(logits, top_k=k, renormalize=True), lambda: native_moe.topk_softmax(logits, k), [()],
                          "vLLM 0.23.0 topk_softmax")  # fmt: skip
            xs = sets(lambda: (randn(T, k, D),), 2 * T * D * (k + 1))
            natives = {"torch.sum of weighted rows": lambda v: v.sum(1)}
            if cases.vllm:
                natives["vLLM moe_sum of weighted rows"] = native_vllm.sum_experts
            cases.add("moe.combine", f"{T}x{k}x{D}, {E} experts", lambda v: moe.combine(v, weights, chosen, num_experts=E, combine_groups=groups), natives, xs)
            if T == 4096:
                leaves, g = [t.requires_grad_() for t in (x, gate_up, down)], randn(T, k, D)
                cases.add("moe.expert_mlp", f"{T} tokens, {E} experts with gradient", lambda: torch.autograd.grad(moe.expert_mlp(x, chosen, gate_up, down), leaves, g),
                          lambda: torch_experts(x, chosen, gate_up, down, leaves, g), [()], "torch grouped_mm, sorted rows")  # fmt: skip
                for t in leaves:
                    t.requires_grad_(False)
    cases.mean("moe.expert_mlp + combine", "forward", 1.0)


def torch_experts(x, chosen, gate_up, down, leaves, g):
    """Forward and backward by torch's grouped product: pairs sorted by expert, silu in eager torch."""
    k, E = chosen.shape[1], len(gate_up)
    order = chosen.flatten().argsort(stable=True)
    ends = torch.zeros(E, dtype=torch.int64, device=x.device).index_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten()).cumsum(0).int()
    gate, up = torch._grouped_mm(x[order // k], gate_up.mT, offs=ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    values = torch.empty_like(rows).index_copy(0, order, rows).view(g.shape)
    return torch.autograd.grad(values, leaves, g)


def main():
    options = table.options(__doc__, "cases whose op's name holds this word, or one of several between commas")
    torch.manual_seed(0)
    if options.native:
        native_vllm.load(options.native)
    cases = Cases(options.only, table.Table(options.out, options.commit), bool(options.native))
    native = native_moe.load(options.native) if options.native else None
    parts = (
        (norms, ("norm.rms_norm", "norm.add_rms_norm", "norm.gated_rms_norm")),
        (elementwise, ("activation.silu_mul", "activation.sigmoid_gate", "rope.apply_rope", "embedding.embedding")),
        (logprobs, ("logprob.token_logprob", "logprob.log_softmax", "logprob.scale_by_temperature", "head and logprob")),
        (draws, ("sampling.draw",)),
        (products, ("matmul.linear (Triton)", *(f"matmul.row_parallel G={G}" for G in (2, 4, 8)), "matmul.lm_head")),
        (attentions, ("attention.varlen", "attention.paged")),
        (functools.partial(experts, native=native), ("moe.expert_mlp + combine", "moe.route", "moe.combine")),
    )
    for part, ops in parts:
        if cases.wants(*ops):
            part(cases)
            torch.cuda.empty_cache()
    small = {op for op, stage in cases.taken if op.split(".")[0] in ("norm", "rope", "activation", "logprob") or op in ("moe.route", "moe.combine")}
    cases.mean("norms, rope, gates, router, combine, logprob", "forward", 1.0, *sorted(small))


if __name__ == "__main__":
    main()
