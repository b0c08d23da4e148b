"""Gated DeltaNet against the native kernels: medians on one GPU, both in one run.

    python -m bench.gdn [--native DIR] [--sweep best.json] [--csv bench/results.csv] [--commit HASH]

DIR holds `fla` (fla-core 0.5.1) and `vllm` (the Triton files of vLLM 0.23.0 that these kernels need), if the environment has none. Decode is replayed from a CUDA
graph whose launches walk through pools larger than the L2 cache, as the layers of a model do; sequence shapes exceed it by themselves.
Without --sweep the committed launch table is measured; --sweep times the candidates first and reports the best ones, to be committed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import types

import torch
import triton

from bench.table import PATH, Table, need_gpu
from isoexec.ops import gdn
from isoexec.ops.gdn import launch, triton_core, triton_gradient
from tests.gdn.cases import inputs

H, HV, D, C = 16, 32, 128, 16
SEQUENCES = {"1x10240": [10240], "8x1280": [1280] * 8, "5x2048": [2048] * 5, "1x8192": [8192]}
BATCHES = (1, 8, 64, 256)
L2_BYTES = 120e6
TARGETS = {("cpr_wy", "trainer forward + backward"): 1.02, ("cpr_wy", "prefill"): 0.80, ("mixer", "prefill"): 0.90, ("mixer", "decode"): 0.90}
DECODE_TARGETS = {1: 1.5, 8: 1.5, 64: 0.70, 256: 0.70}
CANDIDATES = {
    ("chain_narrow", "1x10240"): [dict(BV=16, num_warps=1, stages=2), dict(BV=16, num_warps=1, stages=2, unroll=4)],
    ("chain", "8x1280"): [dict(BV=64, num_warps=4, stages=2), dict(BV=64, num_warps=4, stages=2, unroll=2), dict(BV=16, num_warps=1, stages=2, unroll=4)],
    ("back_block", "8x1280"): [dict(BK=64, BV=64, num_warps=8), dict(BK=64, BV=32, num_warps=8)],
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
    """One packed shape: our forms and the native ones, as closures."""

    def __init__(self, lengths):
        self.x = inputs(lengths, H=H, HV=HV, K=D, V=D, device="cuda")
        self.plan = gdn.Plan(lengths, C, device="cuda")
        self.cu = torch.tensor(self.plan.offsets, dtype=torch.long, device="cuda")
        self.grad = torch.randn_like(self.x[2])
        self.slots = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
        self.pool = gdn.StatePool.empty(len(lengths), H, HV, D, D, C, "cuda")
        self.state = torch.zeros(len(lengths), HV, D, D, device="cuda")
        T, channels = self.plan.tokens, 2 * H * D + HV * D
        self.mixed = torch.randn(T, channels, device="cuda").bfloat16()
        self.a, self.b = (torch.randn(T, HV, device="cuda").bfloat16() for _ in range(2))
        self.weight = torch.randn(channels, 4, device="cuda").bfloat16()
        self.A_log, self.dt_bias = (torch.rand(HV, device="cuda") for _ in range(2))
        self.conv_state = torch.zeros(len(lengths) + 1, 3, channels, device="cuda", dtype=torch.bfloat16)

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

    def both(self, forward):
        leaves = [t.clone().requires_grad_() for t in self.x]

        def run():
            with torch.enable_grad():
                return torch.autograd.grad(forward(*leaves), leaves, self.grad)

        return run

    def mixer_prefill(self):
        *x, _ = gdn.mixer_inputs(self.mixed, self.a, self.b, self.weight, self.A_log, self.dt_bias, self.plan, H, HV, D, D)
        return gdn.cpr_wy_prefill(*x, self.plan, self.pool, self.slots)

    def native(self):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla
        from vllm.model_executor.layers.fla.ops import chunk_gated_delta_rule as vllm
        from vllm.model_executor.layers.fla.ops.fused_gdn_prefill_post_conv import fused_post_conv_prep
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn
        from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

        tables = types.SimpleNamespace()  # built once per batch, as the engine does
        tables.nums_dict, tables.batch_ptr, tables.token_chunk_offset_ptr = compute_causal_conv1d_metadata(
            torch.tensor(self.plan.offsets), device="cuda"
        )
        cu, fresh, slots = self.cu.int(), self.slots < 0, self.slots + 1

        def run_fla(q, k, v, g, beta, state=None):
            return fla(q[None], k[None], v[None], g=g[None], beta=beta[None], cu_seqlens=self.cu, initial_state=state,
                       output_final_state=state is not None)[0][0]  # fmt: skip

        def run_vllm(q, k, v, g, beta):
            return vllm(q[None], k[None], v[None], g=g[None], beta=beta[None], cu_seqlens=self.cu, initial_state=self.state,
                        output_final_state=True)[0]  # fmt: skip

        def mixer():
            y = causal_conv1d_fn(self.mixed.T, self.weight, None, self.conv_state.transpose(1, 2), cu, cache_indices=slots,
                                 has_initial_state=fresh, metadata=tables)  # fmt: skip
            return run_vllm(*fused_post_conv_prep(y.T, self.a, self.b, self.A_log, self.dt_bias, H, D, D))

        return run_fla, run_vllm, mixer


class Decode:
    """A batch of B lanes over enough layers' pools to exceed the L2 cache."""

    def __init__(self, B):
        self.B, self.layers = B, max(1, int(L2_BYTES // (B * HV * D * D * 2)))
        self.x = inputs([B], H=H, HV=HV, K=D, V=D, device="cuda")
        generator = torch.Generator().manual_seed(0)
        self.positions = (torch.randint(0, 3000, (B,), generator=generator) + 1000).int().cuda()
        self.slots = torch.randperm(B, generator=generator).int().cuda() + 1
        channels = 2 * H * D + HV * D
        self.mixed = torch.randn(B, channels, device="cuda").bfloat16()
        self.a, self.b = (torch.randn(B, HV, device="cuda").bfloat16() for _ in range(2))
        self.weight = torch.randn(channels, 4, device="cuda").bfloat16()
        self.A_log, self.dt_bias = (torch.rand(HV, device="cuda") for _ in range(2))
        self.windows = [torch.zeros(B + 1, 3, channels, device="cuda", dtype=torch.bfloat16) for _ in range(self.layers)]

    def pool(self):
        pool = gdn.StatePool.empty(self.B + 1, H, HV, D, D, C, "cuda")
        high, low = gdn.split_planes(torch.randn(pool.high.shape, device="cuda") * 0.05)
        pool.high.copy_(high)
        pool.low.copy_(low)
        pool.k.normal_(std=0.09)
        pool.rhs.normal_()
        pool.gates.fill_(0.5)
        pool.gates[:, :, 0] = -0.5
        return pool

    def ours(self):
        pools, out = [self.pool() for _ in range(self.layers)], torch.empty_like(self.x[2])
        core = [lambda p=p: triton_core.decode(*self.x, p, self.slots, self.positions, out=out) for p in pools]

        def mixer(p, w):
            x = gdn.mixer_step_inputs(self.mixed, self.a, self.b, self.weight, self.A_log, self.dt_bias, w, self.slots, H, HV, D, D)
            return triton_core.decode(*x, p, self.slots, self.positions, out=out)

        return core, [lambda p=p, w=w: mixer(p, w) for p, w in zip(pools, self.windows)]

    def native(self):
        from vllm.model_executor.layers.fla.ops.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode as packed
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        states = [torch.randn(self.B + 1, HV, D, D, device="cuda") * 0.05 for _ in range(self.layers)]
        out = torch.empty(self.B, 1, HV, D, dtype=torch.bfloat16, device="cuda")

        def core(mixed, state):
            return packed(mixed, self.a, self.b, self.A_log, self.dt_bias, D**-0.5, state, out, self.slots, use_qk_l2norm_in_kernel=True)

        def mixer(state, window):
            y = causal_conv1d_update(self.mixed, window.transpose(1, 2), self.weight, None, "silu", conv_state_indices=self.slots)
            return core(y, state)

        return [lambda s=s: core(self.mixed, s) for s in states], [lambda s=s, w=w: mixer(s, w) for s, w in zip(states, self.windows)]


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


def measure(shapes, batches):
    """-> rows of (op, stage, shape, ours, {native name: us}, target)"""
    for name in ("1x10240", "8x1280", "5x2048", "1x8192"):
        case = shapes(name)
        run_fla, run_vllm, mixer = case.native()
        fla_state = lambda: run_fla(*case.x, state=case.state)
        if name in ("1x10240", "8x1280"):
            yield "cpr_wy", "trainer forward", name, median_us(case.forward), {"fla 0.5.1 chunk": median_us(lambda: run_fla(*case.x))}, None
            both = "trainer forward + backward"
            native = {"fla 0.5.1 chunk (its Triton backward, which it refuses on Hopper as incorrect: timing only)": median_us(case.both(run_fla))}
            ours = median_us(case.both(lambda *x: gdn.cpr_wy(*x, case.plan)))
            yield "cpr_wy", both, name, ours, native, TARGETS["cpr_wy", both]
        else:
            native = {"fla 0.5.1 chunk": median_us(fla_state), "vllm 0.23.0 chunk": median_us(lambda: run_vllm(*case.x))}
            yield "cpr_wy", "prefill", name, median_us(case.prefill), native, TARGETS["cpr_wy", "prefill"]
            native = {"vllm 0.23.0 conv, post-conv, chunk": median_us(mixer)}
            yield "mixer", "prefill", name, median_us(case.mixer_prefill), native, TARGETS["mixer", "prefill"]
    for B in batches:
        case = Decode(B)
        core, mixer = case.ours()
        ours = graph_us(core), graph_us(mixer)
        del core, mixer
        core, mixer = case.native()
        name = "vllm 0.23.0 packed decode (gating and l2norm inside)"
        yield "cpr_wy", "decode", str(B), ours[0], {name: graph_us(core)}, DECODE_TARGETS[B]
        yield "mixer", "decode", str(B), ours[1], {"vllm 0.23.0 conv update, packed decode": graph_us(mixer)}, TARGETS["mixer", "decode"]
        del core, mixer, case
        torch.cuda.empty_cache()


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
            cache[name] = Sequence([min(n, 200) for n in SEQUENCES[name]] if args.warm else SEQUENCES[name])
        return cache[name]

    if args.warm:
        return warm(shapes, *args.warm)
    if args.sweep:
        with open(args.sweep, "w") as file:
            json.dump(sweep(shapes), file, indent=1)
    table, kernels = Table(args.csv, args.commit), launch.digest()[:16]
    for op, stage, shape, ours, native, target in measure(shapes, BATCHES):
        name, best = min(native.items(), key=lambda item: item[1])
        clock = "graph" if stage == "decode" else "events"
        table.add(f"{op} C={C}", stage, shape, ours, best, name, target=target, clock=clock, note=f"launch table {kernels}")


def warm(shapes, share, of):
    """Compile what the run needs, a share per process."""
    jobs = []
    for (kernel, shape), entries in CANDIDATES.items():
        for entry in entries:

            def job(kernel=kernel, shape=shape, entry=entry):
                case = shapes(shape)
                saved = launch.TABLE[kernel]
                launch.TABLE[kernel] = {**saved, str(C): entry}
                (case.forward if kernel.startswith("chain") else case.backward(case.saved()))()
                launch.TABLE[kernel] = saved

            jobs.append(job)
    jobs += [lambda: shapes("1x10240").both(lambda *x: gdn.cpr_wy(*x, shapes("1x10240").plan))(), lambda: shapes("5x2048").mixer_prefill()]
    jobs += [lambda: shapes("5x2048").native()[2](), lambda: shapes("8x1280").both(shapes("8x1280").native()[0])()]
    for index, B in ((0, 1), (1, 1), (1, 64)):
        jobs.append(lambda index=index, B=B: Decode(B).ours()[index][0]())
    jobs.append(lambda: Decode(1).native()[1][0]())
    for job in jobs[share::of]:
        try:
            job()
        except Exception as error:
            print("warm:", str(error)[:300], flush=True)


def warm_all(argv, processes=12, limit_s=90):
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
        warm_all(["--native", sys.argv[sys.argv.index("--native") + 1]] if "--native" in sys.argv else [])
    main()
