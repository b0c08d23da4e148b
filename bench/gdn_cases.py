"""The cases of bench/gdn.py: inputs of a packed batch or a decode batch, and our side of each stage as launch sets (lists of callables)."""

from __future__ import annotations

import torch

from isoexec.models import qwen3_5
from isoexec.ops import gdn
from isoexec.ops.gdn import triton_core, triton_decode, triton_gradient
from isoexec.ops.norm import gated_rms_norm
from tests.gdn.cases import inputs

H, HV, D = 16, 32, 128
HEADS = (H, HV, D, D)
CHANNELS = 2 * H * D + HV * D
SEQUENCES = {"1x10240": [10240], "8x1280": [1280] * 8, "5x2048": [2048] * 5, "1x8192": [8192]}
L2_BYTES = 120e6
REPEATS = 4  # launch sets of a sequence in one graph; its data exceed the L2 cache by themselves


class _Edges:
    """What surrounds the core: projections, weights."""

    def __init__(self, rows):
        draw = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()
        self.heads = HEADS
        self.mixed, self.a, self.b, self.z = draw(rows, CHANNELS), draw(rows, HV), draw(rows, HV), draw(rows, HV, D)
        self.weight, self.norm_weight = draw(CHANNELS, 4), torch.rand(D, device="cuda").bfloat16()
        self.A_log, self.dt_bias = (torch.rand(HV, device="cuda") for _ in range(2))

    def values(self):
        return self.mixed, self.a, self.b, self.z, self.weight, self.A_log, self.dt_bias, self.norm_weight


def as_models(x, a, b, z, weight, A_log, dt_bias, norm_weight, convolve, mix):
    """The models' own function between the projections (isoexec/models/qwen3_5.py)."""
    mixer = qwen3_5.GatedDeltaNet((), None, weight, A_log, dt_bias, norm_weight, None, D, D, 1e-6)
    return qwen3_5.gdn_mixer(x, z, b, a, mixer, convolve, mix)


class Sequence(_Edges):
    """One packed shape."""

    def __init__(self, lengths, chunk=16):
        super().__init__(sum(lengths))
        self.chunk = chunk
        self.x = inputs(lengths, H=H, HV=HV, K=D, V=D, device="cuda")
        self.plan = gdn.Plan(lengths, chunk, device="cuda")
        self.cu = torch.tensor(self.plan.offsets, dtype=torch.long, device="cuda")
        self.grad = torch.randn_like(self.x[2])
        self.slots = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
        self.state = torch.zeros(len(lengths), HV, D, D, device="cuda")
        self.windows = torch.zeros(len(lengths) + 1, 3, CHANNELS, device="cuda", dtype=torch.bfloat16)
        self.pools = {form: kind.empty(len(lengths), *HEADS, chunk, "cuda") for form, kind in gdn.POOLS.items()}

    def forward(self, form="cpr_wy"):
        return [lambda: getattr(gdn, form)(*self.x, self.plan)] * REPEATS

    def prefill(self, form="cpr_wy"):
        return [lambda: getattr(gdn, f"{form}_prefill")(*self.x, self.plan, self.pools[form], self.slots)] * REPEATS

    def both(self, forward, values=None):
        """Forward and backward of ``forward(*values)`` (the core's inputs by default)."""
        leaves = [t.detach().clone().requires_grad_() for t in (self.x if values is None else values)]

        def run():
            with torch.enable_grad():
                return torch.autograd.grad(forward(*leaves), leaves, self.grad)

        return [run] * REPEATS

    def train(self, form="cpr_wy"):
        return self.both(lambda *x: getattr(gdn, form)(*x, self.plan))

    def saved(self):
        q, k, v, g, beta = self.x
        ws = triton_core.prepass(q, k, g, beta, self.plan, D**-0.5)
        _, u, h = triton_core.chain(q, k, v, self.plan, ws, torch.bfloat16, save=True)
        return q, k, v, g, beta, u, h, ws.b, ws.E, ws.T, ws.M

    def backward(self):
        saved = self.saved()
        return [lambda: triton_gradient.backward(saved, self.plan, D**-0.5, self.grad)] * REPEATS

    def mixer_train(self, *values):
        """As the trainer's layers run it."""
        return as_models(*values, lambda x, w: gdn.conv1d(x, w, self.plan)[0], lambda *x: gdn.cpr_wy(*x, self.plan))

    def fused_train(self, x, a, b, z, weight, A_log, dt_bias, norm_weight):
        *x, _ = gdn.mixer_inputs(x, a, b, weight, A_log, dt_bias, self.plan, *HEADS)
        return gated_rms_norm(gdn.cpr_wy(*x, self.plan), z, norm_weight, 1e-6)

    def mixer_prefill(self):
        """As the engine's layers run it: windows and slots are looked up in the cache, values are rows of the channels."""

        def convolve(x, weight):
            y, self.windows[self.slots] = gdn.conv1d(x, weight, self.plan, self.windows[self.slots])
            return y

        mix = lambda *x: gdn.cpr_wy_prefill(*x, self.plan, self.pools["cpr_wy"], self.slots)
        return [lambda: as_models(*self.values(), convolve, mix)] * REPEATS

    def fused_prefill(self):
        def run():
            window = self.windows[self.slots]
            *x, self.windows[self.slots] = gdn.mixer_inputs(
                self.mixed, self.a, self.b, self.weight, self.A_log, self.dt_bias, self.plan, *HEADS, window=window
            )
            o = gdn.cpr_wy_prefill(*x, self.plan, self.pools["cpr_wy"], self.slots)
            return gated_rms_norm(o, self.z, self.norm_weight, 1e-6)

        return [run] * REPEATS


class Decode(_Edges):
    """A batch of B lanes over enough layers' pools to exceed the L2 cache. A launch set is one layer's step."""

    def __init__(self, B):
        super().__init__(B)
        self.B, self.layers = B, max(1, int(L2_BYTES // (B * HV * D * D * 2)))
        self.x = inputs([B], H=H, HV=HV, K=D, V=D, device="cuda")
        generator = torch.Generator().manual_seed(0)
        self.positions = (torch.randint(0, 3000, (B,), generator=generator) + 1000).int().cuda()
        self.slots = torch.randperm(B, generator=generator).int().cuda() + 1
        self.windows = [torch.zeros(B + 1, 3, CHANNELS, device="cuda", dtype=torch.bfloat16) for _ in range(self.layers)]
        self.where = (self.slots, self.positions)

    def pools(self, chunk, form="cpr_wy"):
        return [self.pool(chunk, form) for _ in range(self.layers)]

    def pool(self, chunk, form):
        pool = gdn.POOLS[form].empty(self.B + 1, *HEADS, chunk, "cuda")
        high, low = gdn.split_planes(torch.randn(pool.high.shape, device="cuda") * 0.05)
        pool.high.copy_(high)
        pool.low.copy_(low)
        pool.k.normal_(std=0.09)
        pool.rhs.normal_()
        pool.gates.fill_(0.5)
        pool.gates[:, :, 0] = -0.5
        if form == "cpr":
            pool.now.normal_(std=0.05)
        return pool

    def core(self, chunk=16, form="cpr_wy"):
        """The core alone, its inputs ready."""
        decode = getattr(gdn, f"{form}_decode")
        return [lambda p=p: decode(*self.x, p, *self.where) for p in self.pools(chunk, form)]

    def step(self, chunk=16):
        """Gating and l2norm inside."""
        out = torch.empty_like(self.x[2])
        parts = (self.mixed, self.a, self.b, self.A_log, self.dt_bias)
        return [lambda p=p: triton_decode.step(*parts, p, *self.where, *HEADS, out=out) for p in self.pools(chunk)]

    def mixer(self, chunk=16):
        """As the engine's layers run it."""
        return [self._layer(p, w) for p, w in zip(self.pools(chunk), self.windows)]

    def _layer(self, p, w):
        convolve = lambda x, weight: gdn.conv1d_step(x, weight, w, self.slots)
        mix = lambda *x: gdn.cpr_wy_decode(*x, p, *self.where)
        return lambda: as_models(*self.values(), convolve, mix)

    def fused_mixer(self, chunk=16):
        x, a, b, z, weight, A_log, dt_bias, norm_weight = self.values()
        parts, out = (x, a, b, z, weight, A_log, dt_bias, norm_weight), torch.empty_like(self.x[2])
        step = triton_decode.mixer_step
        return [lambda p=p, w=w: step(*parts, w, p, *self.where, *HEADS, out=out) for p, w in zip(self.pools(chunk), self.windows)]
