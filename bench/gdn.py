"""Gated DeltaNet against the native kernels: medians on one GPU, both in one run.

    python -m bench.gdn [--native DIR] [--sweep best.json] [--csv bench/results.csv] [--commit HASH]

DIR holds `fla` (fla-core 0.5.1), tilelang (fla's backward needs it on Hopper) and `vllm` (the Triton files of vLLM 0.23.0 that are used
here), if the environment has none. Decode is replayed from a CUDA graph whose launches walk through pools larger than the L2 cache, as the
layers of a model do; sequence shapes exceed it by themselves. A native kernel that does not run is named in the row's note.
Without --sweep the committed launch table is measured; --sweep times the candidates first and reports the best ones, to be committed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch
import triton

from bench import gdn_native as native
from bench.table import PATH, Table, need_gpu
from isoexec.ops import gdn
from isoexec.ops.gdn import launch, triton_core, triton_decode, triton_gradient
from isoexec.ops.norm import gated_rms_norm
from tests.gdn.cases import inputs

H, HV, D, C = 16, 32, 128, 16
HEADS = (H, HV, D, D)
SEQUENCES = {"1x10240": [10240], "8x1280": [1280] * 8, "5x2048": [2048] * 5, "1x8192": [8192]}
BATCHES = (1, 8, 64, 256)
L2_BYTES = 120e6
BOTH = "trainer forward + backward"
TARGETS = {("cpr_wy", BOTH): 1.02, ("cpr_wy", "prefill"): 0.80, ("mixer", "prefill"): 0.90, ("mixer", BOTH): 0.90}
MIXER_DECODE_TARGETS = {256: 0.90}
DECODE_TARGETS = {1: 1.5, 8: 1.5, 64: 0.70, 256: 0.70}


def _entries(**lists):
    """Settings from columns: _entries(BV=(16, 32), num_warps=(1, 2)) -> two entries."""
    return [dict(zip(lists, row)) for row in zip(*lists.values())]


#: (kernel, shape) -> entries; each is timed inside its whole stage.
CANDIDATES = {
    ("chain_narrow", "1x10240"): _entries(BV=(16, 16, 16), num_warps=(1,) * 3, stages=(3, 2, 2), unroll=(4, 4, 2)),
    ("chain", "8x1280"): _entries(BV=(64, 64, 16), num_warps=(4, 4, 1), stages=(2,) * 3, unroll=(2, 1, 4)),
    ("back_chain_narrow", "1x10240"): _entries(BV=(16, 16), num_warps=(1, 1), stages=(3, 2)),
    ("back_chain", "8x1280"): _entries(BV=(64, 16, 32), num_warps=(4, 1, 2), stages=(2,) * 3),
    ("back_inner", "8x1280"): _entries(BV=(64, 64, 32, 32), num_warps=(4,) * 4, stages=(3, 1, 2, 3)),
    ("back_query", "8x1280"): _entries(BK=(64, 64, 128), BV=(64, 32, 64), num_warps=(4, 4, 8), stages=(2,) * 3),
    ("back_key", "8x1280"): _entries(BV=(64, 64, 32), num_warps=(4, 4, 4), stages=(2, 1, 2)),
}  # fmt: skip


def median_us(fn) -> float:
    fn()
    torch.cuda.synchronize()
    return triton.testing.do_bench(fn, warmup=10, rep=60, return_mode="median") * 1e3


def graph_us(launches) -> float:
    """Median time of one launch set among ``launches``, all in one graph."""
    for fn in launches:
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for fn in launches:
            fn()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return sorted(times)[len(times) // 2]


class Sequence:
    """One packed shape: inputs and our forms, as closures."""

    def __init__(self, lengths):
        self.heads = HEADS
        self.x = inputs(lengths, H=H, HV=HV, K=D, V=D, device="cuda")
        self.plan = gdn.Plan(lengths, C, device="cuda")
        self.cu = torch.tensor(self.plan.offsets, dtype=torch.long, device="cuda")
        self.grad = torch.randn_like(self.x[2])
        self.slots = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
        self.pool = gdn.StatePool.empty(len(lengths), H, HV, D, D, C, "cuda")
        self.state = torch.zeros(len(lengths), HV, D, D, device="cuda")
        _edges(self, self.plan.tokens)
        self.conv_state = torch.zeros(len(lengths) + 1, 3, self.mixed.shape[1], device="cuda", dtype=torch.bfloat16)

    def forward(self):
        return gdn.cpr_wy(*self.x, self.plan)

    def prefill(self):
        return gdn.cpr_wy_prefill(*self.x, self.plan, self.pool, self.slots)

    def saved(self):
        q, k, v, g, beta = self.x
        ws = triton_core.prepass(q, k, g, beta, self.plan, D**-0.5)
        _, u, h = triton_core.chain(q, k, v, self.plan, ws, torch.bfloat16, save=True)
        return q, k, v, g, beta, u, h, ws.b, ws.E, ws.T, ws.M

    def backward(self, saved):
        return lambda: triton_gradient.backward(saved, self.plan, D**-0.5, self.grad)

    def both(self, forward, values=None):
        """Forward and backward of ``forward(*values)`` (the core's inputs by default)."""
        leaves = [t.detach().clone().requires_grad_() for t in (self.x if values is None else values)]

        def run():
            with torch.enable_grad():
                return torch.autograd.grad(forward(*leaves), leaves, self.grad)

        return run

    def mixer_values(self):
        return self.mixed, self.a, self.b, self.z, self.weight, self.A_log, self.dt_bias, self.norm_weight

    def mixer_train(self, x, a, b, z, weight, A_log, dt_bias, norm_weight):
        *x, _ = gdn.mixer_inputs(x, a, b, weight, A_log, dt_bias, self.plan, *HEADS)
        return gated_rms_norm(gdn.cpr_wy(*x, self.plan), z, norm_weight, 1e-6)

    def mixer_prefill(self):
        *x, _ = gdn.mixer_inputs(self.mixed, self.a, self.b, self.weight, self.A_log, self.dt_bias, self.plan, *HEADS)
        return gated_rms_norm(gdn.cpr_wy_prefill(*x, self.plan, self.pool, self.slots), self.z, self.norm_weight, 1e-6)


class Decode:
    """A batch of B lanes over enough layers' pools to exceed the L2 cache."""

    def __init__(self, B):
        self.B, self.heads, self.layers = B, HEADS, max(1, int(L2_BYTES // (B * HV * D * D * 2)))
        self.x = inputs([B], H=H, HV=HV, K=D, V=D, device="cuda")
        generator = torch.Generator().manual_seed(0)
        self.positions = (torch.randint(0, 3000, (B,), generator=generator) + 1000).int().cuda()
        self.slots = torch.randperm(B, generator=generator).int().cuda() + 1
        _edges(self, B)
        self.windows = [torch.zeros(B + 1, 3, self.mixed.shape[1], device="cuda", dtype=torch.bfloat16) for _ in range(self.layers)]

    def pool(self, chunk=C):
        pool = gdn.StatePool.empty(self.B + 1, H, HV, D, D, chunk, "cuda")
        high, low = gdn.split_planes(torch.randn(pool.high.shape, device="cuda") * 0.05)
        pool.high.copy_(high)
        pool.low.copy_(low)
        pool.k.normal_(std=0.09)
        pool.rhs.normal_()
        pool.gates.fill_(0.5)
        pool.gates[:, :, 0] = -0.5
        return pool

    def launches(self):
        """-> launch sets of the core (gating and l2norm inside) and of the whole mixer."""
        pools, out = [self.pool() for _ in range(self.layers)], torch.empty_like(self.x[2])
        where, gates = (self.slots, self.positions, *HEADS), (self.a, self.b)
        core = [lambda p=p: triton_decode.step(self.mixed, *gates, self.A_log, self.dt_bias, p, *where, out=out) for p in pools]
        parts = (self.mixed, *gates, self.z, self.weight, self.A_log, self.dt_bias, self.norm_weight)
        mixer = [lambda p=p, w=w: triton_decode.mixer_step(*parts, w, p, *where, out=out) for p, w in zip(pools, self.windows)]
        return core, mixer

    def bare(self, chunk):
        """Launch sets of the core alone, its inputs ready."""
        out = torch.empty_like(self.x[2])
        pools = [self.pool(chunk) for _ in range(self.layers)]
        return [lambda p=p: triton_decode.decode(*self.x, p, self.slots, self.positions, out=out) for p in pools]


def _edges(case, rows):
    """What surrounds the core, on ``case``: projections, weights."""
    channels = 2 * H * D + HV * D
    case.mixed = torch.randn(rows, channels, device="cuda").bfloat16()
    case.a, case.b = (torch.randn(rows, HV, device="cuda").bfloat16() for _ in range(2))
    case.z = torch.randn(rows, HV, D, device="cuda").bfloat16()
    case.weight = torch.randn(channels, 4, device="cuda").bfloat16()
    case.A_log, case.dt_bias = (torch.rand(HV, device="cuda") for _ in range(2))
    case.norm_weight = torch.rand(D, device="cuda").bfloat16()


def sweep(shapes):
    """Time every candidate inside its whole stage, keep the best in the table of this process."""
    best = {}
    for (kernel, shape), entries in CANDIDATES.items():
        case, times = shapes(shape), []
        fn = case.forward if kernel.startswith("chain") else case.backward(case.saved())
        for entry in entries:
            launch.TABLE[kernel] = {**launch.TABLE[kernel], str(C): entry}
            try:
                times.append((median_us(fn), entry))
                print(f"sweep {kernel} {shape} {entry} {times[-1][0]:.1f}", flush=True)
            except Exception as error:
                print(f"sweep {kernel} {entry}: {str(error)[:200]}", flush=True)
        time_us, entry = min(times, key=lambda t: t[0])
        launch.TABLE[kernel] = {**launch.TABLE[kernel], str(C): entry}
        best[f"{kernel} {shape}"] = {"us": time_us, "entry": entry}
    return best


def _attempt(name, timed, failures):
    """Time of a native kernel; None and a note where it does not run."""
    try:
        return {name: timed()}
    except Exception as error:  # a native kernel's refusal is a result
        failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}")
        return {}


def measure(shapes, batches):
    """-> rows of (op, stage, shape, ours, {native name: us}, target, what did not run)"""
    for name in SEQUENCES:
        yield from _sequence(name, shapes(name))
    for B in batches:
        yield from _decode(Decode(B))
        torch.cuda.empty_cache()


def _sequence(name, case):
    theirs, failed = native.Sequence(case), []
    if name in ("1x10240", "8x1280"):
        found = _attempt("fla 0.5.1 chunk", lambda: median_us(lambda: theirs.fla(*case.x)), failed)
        yield "cpr_wy", "trainer forward", name, median_us(case.forward), found, None, failed
        failed = []
        ours = median_us(case.both(lambda *x: gdn.cpr_wy(*x, case.plan)))
        label = "fla 0.5.1 chunk, q and k repeated, backward by tilelang"
        found = _attempt(label, lambda: median_us(case.both(theirs.fla_train)), failed)
        yield "cpr_wy", BOTH, name, ours, found, TARGETS["cpr_wy", BOTH], failed
        failed, values = [], case.mixer_values()
        label = "fla 0.5.1 conv, l2norm, chunk with gating, gated norm"
        found = _attempt(label, lambda: median_us(case.both(theirs.mixer_train, values)), failed)
        yield "mixer", BOTH, name, median_us(case.both(case.mixer_train, values)), found, TARGETS["mixer", BOTH], failed
    else:
        found = _attempt("fla 0.5.1 chunk", lambda: median_us(lambda: theirs.fla(*case.x, state=case.state)), failed)
        found |= _attempt("vllm 0.23.0 chunk", lambda: median_us(lambda: theirs.vllm(*case.x)), failed)
        yield "cpr_wy", "prefill", name, median_us(case.prefill), found, TARGETS["cpr_wy", "prefill"], failed
    if name != "8x1280":
        failed = []
        found = _attempt("vllm 0.23.0 conv, post-conv, chunk, gated norm", lambda: median_us(theirs.mixer_prefill), failed)
        yield "mixer", "prefill", name, median_us(case.mixer_prefill), found, TARGETS["mixer", "prefill"], failed


def _decode(case):
    (core, mixer), failed, shape = case.launches(), [], str(case.B)
    ours = graph_us(core), graph_us(mixer)
    core, mixer = native.Decode(case).launches()
    found = _attempt("vllm 0.23.0 packed decode (gating and l2norm inside, as ours)", lambda: graph_us(core), failed)
    yield "cpr_wy", "decode", shape, ours[0], found, DECODE_TARGETS[case.B], failed
    failed = []
    found = _attempt("vllm 0.23.0 conv update, packed decode, gated norm", lambda: graph_us(mixer), failed)
    yield "mixer", "decode", shape, ours[1], found, MIXER_DECODE_TARGETS.get(case.B), failed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--native", default="")
    parser.add_argument("--csv", default=PATH)
    parser.add_argument("--sweep")
    parser.add_argument("--commit", default="")
    parser.add_argument("--warm", type=int, nargs=2, metavar=("SHARE", "OF"), help="compile a share of the kernels, measure nothing")
    args = parser.parse_args()
    if args.native:
        sys.path.insert(0, args.native)
    torch.set_grad_enabled(False)
    cache: dict = {}

    def shapes(name):
        if name not in cache:
            cache.clear()
            cache[name] = Sequence([min(n, 1024) for n in SEQUENCES[name]] if args.warm else SEQUENCES[name])
        return cache[name]

    if args.warm:
        return warm(shapes, args.sweep, *args.warm)
    if args.sweep:
        with open(args.sweep, "w") as file:
            json.dump(sweep(shapes), file, indent=1)
    native.tune_quickly()
    table, kernels = Table(args.csv, args.commit), launch.digest()[:16]
    for op, stage, shape, ours, found, target, failed in measure(shapes, BATCHES):
        name, best = min(found.items(), key=lambda item: item[1]) if found else ("", None)
        others = [f"{other} {us:.1f} us" for other, us in found.items() if other != name]
        note = "; ".join([f"launch table {kernels}", *others, *failed])
        table.add(f"{op} C={C}", stage, shape, ours, best, name, target=target, clock="graph" if stage == "decode" else "events", note=note)


def warm(shapes, swept, share, of):
    """Compile what the run needs, a share per process; of kernels that tune themselves, a share of their configurations."""
    jobs = []
    for (kernel, shape), entries in CANDIDATES.items() if swept else ():
        for entry in entries:

            def job(kernel=kernel, shape=shape, entry=entry):
                case = shapes(shape)
                saved = launch.TABLE[kernel]
                launch.TABLE[kernel] = {**saved, str(C): entry}
                (case.forward if kernel.startswith("chain") else case.backward(case.saved()))()
                launch.TABLE[kernel] = saved

            jobs.append(job)
    for name in ("1x10240", "8x1280"):
        jobs.append(lambda name=name: shapes(name).both(shapes(name).mixer_train, shapes(name).mixer_values())())
        jobs.append(lambda name=name: shapes(name).forward())
    jobs += [lambda: shapes("5x2048").mixer_prefill(), lambda: shapes("1x8192").mixer_prefill()]
    for index, B in ((0, 1), (1, 1), (0, 64)):
        jobs.append(lambda index=index, B=B: Decode(B).launches()[index][0]())
    jobs.append(lambda: native.Decode(Decode(1)).launches()[1][0]())
    native.tune_quickly(share, of)
    theirs = lambda name: native.Sequence(shapes(name))
    everywhere = [
        lambda: theirs("8x1280").fla(*shapes("8x1280").x),
        lambda: shapes("8x1280").both(theirs("8x1280").fla_train)(),
        lambda: shapes("8x1280").both(theirs("8x1280").mixer_train, shapes("8x1280").mixer_values())(),
        lambda: theirs("5x2048").mixer_prefill(),
        lambda: theirs("5x2048").fla(*shapes("5x2048").x, state=shapes("5x2048").state),
    ]
    for job in [*jobs[share::of], *everywhere]:
        try:
            job()
        except Exception as error:
            print("warm:", type(error).__name__, str(error)[:300], flush=True)


def warm_all(argv, processes=14, limit_s=120):
    """Compile in parallel processes, then return."""
    started = time.time()
    children = [subprocess.Popen([sys.executable, "-m", "bench.gdn", *argv, "--warm", str(i), str(processes)]) for i in range(processes)]
    for child in children:
        try:
            child.wait(max(1.0, limit_s - (time.time() - started)))
        except subprocess.TimeoutExpired:
            child.kill()


if __name__ == "__main__":
    need_gpu()
    if "--warm" not in sys.argv:
        warm_all(sys.argv[1:])
    main()
