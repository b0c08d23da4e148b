"""Every Triton launch of the op library but Gated DeltaNet's, as closures over the public forms: for the sanitizer (small shapes, on a GPU) and for
compiling without one (the shapes of models, tensors on the CPU: nothing runs)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from isoexec.ops._core import triton_digest
from isoexec.ops._trace import digest as rows_digest
from isoexec.ops.activation import triton as activation
from isoexec.ops.attention import triton as attention
from isoexec.ops.attention import triton_backward
from isoexec.ops.embedding import triton as embedding
from isoexec.ops.logprob import triton as logprob
from isoexec.ops.matmul import triton as matmul
from isoexec.ops.moe import triton_combine, triton_grouped, triton_plan
from isoexec.ops.moe.triton_route import Route
from isoexec.ops.norm import triton as norm
from isoexec.ops.rope import triton as rope
from isoexec.ops.sampling import triton as sampling


class Sizes(NamedTuple):
    """T tokens, D hidden, F expert width, V vocabulary, E experts, k chosen; heads: (query heads, key heads, size)."""

    T: int
    D: int
    F: int
    V: int
    E: int
    k: int
    heads: tuple[tuple[int, int, int], ...]


SMALL = Sizes(70, 256, 64, 1000, 16, 4, ((4, 2, 64), (4, 2, 128), (4, 2, 256)))
MODEL = Sizes(1024, 2048, 512, 248320, 256, 8, ((16, 4, 64), (32, 8, 128), (16, 16, 192), (16, 2, 256)))


def every(sizes: Sizes, device):
    """-> (name, closure): forward and backward of each form."""
    T, D = sizes.T, sizes.D

    def new(*shape, dtype=torch.bfloat16):
        if torch.device(device).type == "cpu":
            return torch.empty(shape, dtype=dtype)  # nothing reads it
        return torch.randn(shape, device=device).to(dtype)

    def both(function, *inputs):
        leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]

        def run():
            outputs = function(*leaves)
            outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y.requires_grad]
            torch.autograd.grad(outputs, [x for x in leaves if x.requires_grad], [torch.ones_like(y) for y in outputs])

        return run

    w = new(D)
    yield "norm.rms_norm", both(lambda x, w: norm.rms_norm(x, w, 1e-6), new(T, D), w)
    yield "norm.add_zero_centered_rms_norm", both(lambda x, r, w: norm.add_zero_centered_rms_norm(x, r, w, 1e-6), new(T, D), new(T, D), w)
    yield "norm of heads", both(lambda x, w: norm.zero_centered_rms_norm(x, w, 1e-6), new(T, 16, 128), new(128))
    yield "norm.gated_rms_norm", both(lambda x, z, w: norm.gated_rms_norm(x, z, w, 1e-6), new(T, 32, 128), new(T, 32, 128), new(128))
    yield "norm.residual_add", lambda: norm.residual_add(new(T, D), new(T, D))
    yield "activation.silu_mul", both(activation.silu_mul, new(T, 2 * D))
    yield "activation.sigmoid_gate", both(activation.sigmoid_gate, new(T, 4, 64), new(T, 4, 64))
    yield "shared expert's gate", both(activation.sigmoid_gate, new(T, D), new(T, 1))
    positions = torch.arange(T, device=device)
    yield "rope.rope_table", lambda: rope.rope_table(positions, 64, 1e6)
    tables = torch.randn(T, 32, device=device), torch.randn(T, 32, device=device)
    yield "rope.apply_rope", both(lambda x: rope.apply_rope(x, *tables), new(T, 4, 128))
    yield "rope.apply_rope, interleaved", both(lambda x: rope.apply_rope(x, *tables, interleaved=True), new(T, 4, 64))
    ids = torch.arange(T, device=device) % (sizes.V // 2)
    yield "embedding.embedding", both(lambda w: embedding.embedding(ids, w), new(min(sizes.V, 4096), D))
    rows = min(T, 64)
    logits = new(rows, sizes.V, dtype=torch.float32)
    yield "logprob.log_softmax", lambda: logprob.log_softmax(logits, vocab_size=sizes.V - 3, vocab_block=64)
    yield "logprob.token_logprob", both(lambda x: logprob.token_logprob(x, ids[:rows], vocab_size=sizes.V - 3, vocab_block=64), logits.clone())
    for temperature in (torch.ones((), device=device), torch.ones(rows, device=device)):
        yield f"temperature {tuple(temperature.shape)}", both(lambda x, t=temperature: logprob.scale_by_temperature(x, t), logits.clone())
    yield "sampling.first_maximum", lambda: sampling.first_maximum(logits)
    yield "sampling, race", lambda: sampling._argmax(logits, torch.ones(rows, 3, dtype=torch.int64, device=device))
    yield "digest of rows", lambda: triton_digest.row_sums(rows_digest._pieces(logits), rows_digest._length(logits))
    yield "digest of columns", lambda: triton_digest.column_sums(torch.zeros(T, 1000, dtype=torch.int32, device=device))
    yield "digest of a part", lambda: triton_digest.part_sum(torch.zeros(T, 1000, dtype=torch.int16, device=device), 1000, 2000, 5)
    whole = [logits, logits[1:], torch.zeros(70_001, device=device, dtype=torch.bfloat16)]
    yield "digests of whole tensors", lambda: triton_digest.whole_sums(whole)
    yield from _products(sizes, device, new)
    yield from _attention(sizes, device, new)
    yield from _experts(sizes, device, new)


def _products(sizes, device, new):
    x, w, bias = new(sizes.T, sizes.D), new(sizes.D, sizes.D), new(sizes.D)
    for M in sorted({1, min(sizes.T, 100), sizes.T}):
        for dtype in (torch.bfloat16, torch.float32):
            yield f"matmul, {M} rows, {dtype}", lambda M=M, dtype=dtype: matmul.product(x[:M], w, dtype, bias)
        for leaves in (2, 4, 8):
            yield f"matmul, {M} rows, {leaves} leaves", lambda M=M, leaves=leaves: matmul.product(x[:M], w, torch.bfloat16, None, leaves)
    for leaves in (2, 4, 8):
        yield f"matmul, {leaves} leaves, tiles of many rows", lambda leaves=leaves: matmul.product(x, w, torch.float32, None, leaves, matmul.TREE[leaves])


def _attention(sizes, device, new):
    T, page = sizes.T, 16
    cu = torch.tensor([0, T // 2 - 2, T // 2 - 2, T], dtype=torch.int32, device=device)
    pages = -(-T // page)
    table = torch.arange(3 * pages, dtype=torch.int32, device=device).view(3, -1)
    lens = cu[1:] - cu[:-1]
    for H, G, K in sizes.heads:
        q, k, v = new(T, H, K), new(T, G, K), new(T, G, K)
        cache = [new(3 * pages, page, G, K) for _ in range(2)]
        slots = torch.arange(T, device=device)
        yield f"attention.varlen {K}", lambda q=q, k=k, v=v, K=K: attention.attend(q, k, v, cu, K**-0.5, 64, longest_q=T)
        yield f"attention.write_cache {K}", lambda k=k, v=v, c=cache: attention.write_cache(k, v, *c, slots)
        yield f"attention.paged {K}", lambda q=q, c=cache, K=K: attention.attend(
            q, *c, cu, K**-0.5, 64, longest_q=T, seq_lens=lens, block_table=table
        )
        if K in triton_backward.TILES:
            lse = torch.zeros(H, T, device=device)
            for name, budget in (("saved", triton_backward.SAVED_BYTES), ("computed again", 0)):
                yield f"attention gradients {K}, {name}", lambda q=q, k=k, v=v, K=K, lse=lse, budget=budget: triton_backward.gradients(
                    q, q, k, v, cu, q, lse, K**-0.5, T, budget
                )


def _experts(sizes, device, new):
    T, D, F, E, k = sizes[:3] + sizes[4:6]
    gate_up, down, x = new(E, 2 * F, D), new(E, D, F), new(T, D)
    chosen = torch.stack([(torch.arange(k, device=device) * (E // k) + t) % E for t in range(T)])
    weights = torch.rand(T, k, device=device)
    logits = torch.randn(T, E, device=device)
    for name, arguments in (("softmax", (False, None, 1.0, 1, 1)), ("sigmoid", (True, torch.zeros(E, device=device), 1.8, 8, 4))):

        def route(arguments=arguments):
            leaf = logits.clone().requires_grad_()
            out, _ = Route.apply(leaf, k, True, *arguments)
            torch.autograd.grad(out, leaf, torch.ones_like(out))

        yield f"moe.route, {name}", route
    for name, form in triton_grouped.FORMS.items():

        def experts(form=form):
            plan = triton_plan.make(chosen, 0, E, form.gate_up.rows)
            h, _ = triton_grouped.gate_up(x, gate_up, plan, form.gate_up, True)
            triton_grouped.rows(h, down, plan, form.down, scatter=new(T * k, D))

        yield f"moe.expert_mlp, up to {name} pairs", experts

    def gradients():
        tiles = triton_grouped.GRADIENT
        plan = triton_plan.make(chosen, 0, E, tiles.rows)
        grad, h2, h = new(T * k, D), new(T * k, 2 * F), new(T * k, F)
        triton_grouped.rows(grad, down, plan, tiles, nn=True, gather=True)
        triton_grouped.token_grad(triton_grouped.rows(h2, gate_up, plan, tiles, nn=True), plan)
        triton_grouped.weight_grad(grad, h, plan, triton_grouped.BY_PAIR, triton_grouped.SORTED)
        triton_grouped.weight_grad(h2, x, plan, triton_grouped.SORTED, triton_grouped.BY_TOKEN)

    yield "moe.expert_mlp, gradients", gradients
    values = new(T, k, D)
    for n in (min(T, 64), T):
        yield f"moe.combine, {n} tokens", lambda n=n: triton_combine.total(values[:n], weights[:n], chosen[:n], None, 0, 8, E // 8, torch.bfloat16)
    yield "moe.combine, shared", lambda: triton_combine.total(values, weights, chosen, x, 0, 8, E // 8, torch.float32)
    yield "moe.combine, gradients", lambda: triton_combine.gradients(x, values, weights)
