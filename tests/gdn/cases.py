"""Inputs and drivers shared by the GDN tests, on the CPU and on a GPU."""

from __future__ import annotations

import random

import torch

from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal

F32 = torch.float32


def inputs(lengths, H=1, HV=2, K=32, V=32, seed=0, device="cpu", correlation=0.6):
    """q, k, v, g, beta of a packed batch: correlated keys (the solve is not trivial) and Mamba-like decays."""
    generator = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    normal = lambda *s: torch.randn(*s, generator=generator)
    common = normal(1, H, K) * correlation
    k = torch.nn.functional.normalize(normal(T, H, K) + common, dim=-1).bfloat16()
    q = torch.nn.functional.normalize(normal(T, H, K) + common, dim=-1).bfloat16()
    v = normal(T, HV, V).bfloat16()
    A = torch.empty(HV).uniform_(0.01, 16, generator=generator)
    g = -A * torch.nn.functional.softplus(normal(T, HV) - 4.0)
    beta = torch.sigmoid(normal(T, HV))
    return [x.to(device) for x in (q, k, v, g, beta)]


def dirty_pool(slots, H=1, HV=2, K=32, V=32, chunk=16, device="cpu", kind=gdn.StatePool):
    """A pool whose every slot holds NaN bits."""
    pool = kind.empty(slots, H, HV, K, V, chunk, device)
    for tensor in pool.tensors():
        tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).fill_(-1)
    return pool


def one_shot(x, lengths, chunk=16, form="cpr_wy", **kw):
    return getattr(gdn, form)(*x, gdn.Plan(lengths, chunk, device=x[0].device), out_dtype=F32, **kw)


def select(x, rows):
    at = torch.tensor(rows, dtype=torch.long, device=x[0].device)
    return [t[at].contiguous() for t in x]


class Engine:
    """Drives prefill pieces and decode steps over a pool as an engine would, in ragged, shuffled batches."""

    def __init__(self, x, lengths, pool, slots, form="cpr_wy"):
        self.core = {case: getattr(gdn, f"{form}_{case}") for case in ("prefill", "decode")}
        self.x, self.lengths, self.pool, self.slots = x, lengths, pool, slots
        self.device = x[0].device
        self.first = [sum(lengths[:n]) for n in range(len(lengths))]
        self.done = [0] * len(lengths)
        self.o = torch.full(x[2].shape, float("nan"), dtype=F32, device=self.device)

    def _int(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def prefill(self, pieces: dict[int, int]):
        """pieces: sequence -> new tokens (0 allowed), in this order."""
        rows = [self.first[n] + self.done[n] + j for n, count in pieces.items() for j in range(count)]
        plan = gdn.Plan(list(pieces.values()), self.pool.chunk, [self.done[n] for n in pieces], self.device)
        slots = self._int([self.slots[n] for n in pieces])
        out = self.core["prefill"](*select(self.x, rows), plan, self.pool, slots, out_dtype=F32)
        self.o[torch.tensor(rows, dtype=torch.long, device=self.device)] = out
        for n, count in pieces.items():
            self.done[n] += count

    def decode(self, who: list[int], **kw):
        rows = [self.first[n] + self.done[n] for n in who]
        slots, positions = self._int([self.slots[n] for n in who]), self._int([self.done[n] for n in who])
        out = self.core["decode"](*select(self.x, rows), self.pool, slots, positions, out_dtype=F32, **kw)
        self.o[torch.tensor(rows, dtype=torch.long, device=self.device)] = out
        for n in who:
            self.done[n] += 1

    def left(self, n):
        return self.lengths[n] - self.done[n]

    def random_run(self, seed, share=0.5):
        """Random prefill pieces up to about ``share`` of each sequence, then ragged decode to the end."""
        rng = random.Random(seed)
        for _ in range(3):
            who = [n for n in range(len(self.lengths)) if rng.random() < 0.8]
            rng.shuffle(who)
            if who:
                self.prefill({n: rng.randint(0, max(0, min(self.left(n), int(self.lengths[n] * share / 2)))) for n in who})
        self.finish(rng)
        return self

    def finish(self, rng=None):
        while who := [n for n in range(len(self.lengths)) if self.left(n)]:
            if rng is not None:
                rng.shuffle(who)
                who = who[: rng.randint(1, len(who))]
            self.decode(who)
        return self

    def state(self, n):
        return self.pool.live(self.slots[n], self.done[n])


def engine_of(form, x, lengths, slots=None, chunk=16):
    """An :class:`Engine` of one form of the core over a pool of NaN bits; by default sequence n lies in slot n."""
    (H, K), (HV, V) = x[0].shape[1:], x[2].shape[1:]
    slots = list(range(len(lengths))) if slots is None else slots
    return Engine(x, lengths, dirty_pool(max(slots) + 2, H, HV, K, V, chunk, x[0].device, gdn.POOLS[form]), slots, form)


def assert_same_state(a, b, what):
    for field, x, y in zip(("S", "k", "rhs", "gates", "now"), a, b):
        assert_bit_equal(x, y, f"{what}, {field}")


def recurrence(q, k, v, g, beta, lengths, scale=None):
    """The delta rule token by token in fp64: o [T, HV, V] and the final S [HV, V, K] of each sequence."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    repeat = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = torch.zeros(len(lengths), v.shape[1], v.shape[2], q.shape[2], dtype=torch.float64, device=q.device)
    first = torch.tensor([sum(lengths[:n]) for n in range(len(lengths))], device=q.device)
    o = torch.zeros_like(v)
    for t in range(max(lengths)):
        live = torch.tensor([n for n, L in enumerate(lengths) if t < L], device=q.device)
        row = first[live] + t
        s = S[live] * g[row].exp()[..., None, None]
        u = beta[row][..., None] * (v[row] - torch.einsum("nhvk,nhk->nhv", s, k[row]))
        S[live] = s = s + u[..., None] * k[row][:, :, None, :]
        o[row] = scale * torch.einsum("nhvk,nhk->nhv", s, q[row])
    return o, S


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())
