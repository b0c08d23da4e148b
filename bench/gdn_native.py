"""The native kernels that bench/gdn.py times, composed as their projects do: vLLM's for rollout, flash-linear-attention's for training.

On Hopper fla 0.5.1 runs its backward through tilelang only, which takes as many key heads as value heads: queries and keys are repeated, as
the models that train with it do. FlashInfer's prefill, vLLM's choice on Hopper where it is installed, is taken from a library that
bench/build_flashinfer.py has built, and called as vLLM calls it.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import sys
import types
from pathlib import Path

import torch

from bench.gdn_cases import REPEATS

PACKAGES = ("fla-core", "tilelang", "vllm", "flashinfer-python")
TUNING_MS = (10, 40)  # of a candidate: warm-up, timing
TUNED = f"natives tuned anew for this shape, {TUNING_MS[1]} ms a candidate"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def named(package: str, what: str) -> str:
    """Name of a native side: package, its version as installed, and what is called."""
    return f"{package.removesuffix('-core').removesuffix('-python')} {version(package)} {what}".replace("  ", " ")


def tune(share: int = 0, of: int = 1) -> None:
    """How kernels of this process tune themselves: by :data:`TUNING_MS`; with ``of`` > 1 not at all, and a share is compiled."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def compile_share(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        configs = self.prune_configs(kwargs)
        for config in configs[share::of] or configs[:1]:
            result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result

    if of > 1:
        Autotuner.run = compile_share
    else:
        warmup, rep = TUNING_MS
        Autotuner.do_bench = lambda self, call, quantiles: do_bench(call, warmup=warmup, rep=rep, quantiles=quantiles)


def forget() -> None:
    """What kernels have tuned themselves to for an earlier shape, in memory and on disk."""
    from triton.runtime.autotuner import Autotuner

    for kernel in gc.get_objects():
        if issubclass(type(kernel), Autotuner):
            kernel.cache.clear()
            kernel.cache_results = False


@functools.cache
def flashinfer_prefill():
    """FlashInfer's function ``gdn_prefill``.

    Raises:
        RuntimeError: it has not been built.
    """
    import tvm_ffi

    for folder in sys.path:
        if (library := Path(folder) / "gdn_prefill_sm90.so").is_file():
            return tvm_ffi.load_module(str(library)).gdn_prefill
    raise RuntimeError("no gdn_prefill_sm90.so on the path: build it with bench/build_flashinfer.py")


class Sequence:
    """Packed sequences. ``case`` is bench.gdn_cases.Sequence: its inputs serve both sides."""

    def __init__(self, case):
        from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

        self.case, self.cu = case, case.cu.int()
        self.fresh, self.slots = case.slots < 0, case.slots + 1
        self.tables = types.SimpleNamespace()  # built once per batch, as the engine does
        self.tables.nums_dict, self.tables.batch_ptr, self.tables.token_chunk_offset_ptr = compute_causal_conv1d_metadata(
            torch.tensor(case.plan.offsets), device="cuda"
        )
        self.workspace = torch.empty(torch.cuda.get_device_properties(0).multi_processor_count * 128, dtype=torch.uint8, device="cuda")

    def fla(self, q, k, v, g, beta, state=None):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q[None], k[None], v[None], g=g[None], beta=beta[None], cu_seqlens=self.case.cu, initial_state=state,
                                      output_final_state=state is not None)[0][0]  # fmt: skip

    def fla_train(self, q, k, v, g, beta):
        group = v.shape[1] // q.shape[1]
        return self.fla(q.repeat_interleave(group, 1), k.repeat_interleave(group, 1), v, g, beta)

    def vllm(self, q, k, v, g, beta):
        from vllm.model_executor.layers.fla.ops import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q[None], k[None], v[None], g=g[None], beta=beta[None], cu_seqlens=self.cu,
                                      initial_state=self.case.state, output_final_state=True)[0]  # fmt: skip

    def flashinfer(self, q, k, v, g, beta):
        """``g`` is exponentiated inside, as vLLM does before the call."""
        out, state = torch.empty_like(v), torch.empty_like(self.case.state)
        prefill, scale = flashinfer_prefill(), q.shape[-1] ** -0.5
        prefill(out, state, q, k, v, self.case.cu, self.case.state, torch.exp(g), beta, scale, self.workspace, None, None, 0)
        return out

    def forwards(self):
        return {named("fla-core", "chunk"): [lambda: self.fla(*self.case.x)] * REPEATS}

    def prefills(self):
        x = self.case.x
        return {
            named("fla-core", "chunk"): [lambda: self.fla(*x, state=self.case.state)] * REPEATS,
            named("vllm", "chunk"): [lambda: self.vllm(*x)] * REPEATS,
            named("flashinfer-python", "prefill"): [lambda: self.flashinfer(*x)] * REPEATS,
        }

    def trainings(self):
        return {named("fla-core", "chunk, q and k repeated, backward by tilelang"): self.case.both(self.fla_train)}

    def mixer_prefills(self):
        cores = {"vllm": self.vllm, "flashinfer-python": self.flashinfer}
        around = named("vllm", "conv, post-conv, {}, gated norm")
        return {around.format(named(name, "chunk")): [lambda core=core: self.mixer_prefill(core)] * REPEATS for name, core in cores.items()}

    def mixer_prefill(self, core):
        from vllm.model_executor.layers.fla.ops.fused_gdn_prefill_post_conv import fused_post_conv_prep
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

        c = self.case
        y = causal_conv1d_fn(c.mixed.T, c.weight, None, c.windows.transpose(1, 2), self.cu, cache_indices=self.slots,
                             has_initial_state=self.fresh, metadata=self.tables)  # fmt: skip
        o = core(*fused_post_conv_prep(y.T, c.a, c.b, c.A_log, c.dt_bias, *c.heads[:1], *c.heads[2:]))
        return gated_norm(o, c.z, c.norm_weight)

    def mixer_trainings(self):
        return {named("fla-core", "conv, l2norm, chunk with gating, gated norm"): self.case.both(self.mixer_train, self.case.values())}

    def mixer_train(self, x, a, b, z, weight, A_log, dt_bias, norm_weight):
        from fla.modules.conv.causal_conv1d import causal_conv1d
        from fla.modules.fused_norm_gate import rms_norm_gated
        from fla.modules.l2norm import l2norm
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        H, HV, K, V = self.case.heads
        y = causal_conv1d(x[None], weight, activation="silu", cu_seqlens=self.case.cu)[0]
        q, k, v = (t.unflatten(-1, (-1, d)) for t, d in zip(y.split((H * K, H * K, HV * V), -1), (K, K, V)))
        q, k = (l2norm(t.contiguous()).repeat_interleave(HV // H, 2) for t in (q, k))
        o, _ = chunk_gated_delta_rule(q, k, v.contiguous(), g=a[None], beta=b[None], cu_seqlens=self.case.cu, use_gate_in_kernel=True,
                                      use_beta_sigmoid_in_kernel=True, A_log=A_log, dt_bias=dt_bias)  # fmt: skip
        return rms_norm_gated(o[0], z, norm_weight, None, "swish", eps=1e-6)


def gated_norm(o, z, weight):
    from vllm.model_executor.layers.fla.ops.layernorm_guard import rmsnorm_fn

    V = o.shape[-1]
    return rmsnorm_fn(o.reshape(-1, V), weight, None, z=z.reshape(-1, V), eps=1e-6, group_size=None, norm_before_gate=True)


class Decode:
    """One token per lane. ``case`` is bench.gdn_cases.Decode. Launch sets: one per layer's states."""

    def __init__(self, case):
        H, HV, K, V = case.heads
        self.case = case
        self.states = [torch.randn(case.B + 1, HV, V, K, device="cuda") * 0.05 for _ in range(case.layers)]
        self.out = torch.empty(case.B, 1, HV, V, dtype=torch.bfloat16, device="cuda")
        heads = zip(case.mixed.split((H * K, H * K, HV * V), -1), (K, K, V))
        self.heads = [t.unflatten(-1, (-1, d)).contiguous() for t, d in heads]  # fla convolves q, k and v apart

    def packed(self, mixed, state):
        from vllm.model_executor.layers.fla.ops.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode as packed

        c = self.case
        scale = c.heads[2] ** -0.5
        return packed(mixed, c.a, c.b, c.A_log, c.dt_bias, scale, state, self.out, c.slots, use_qk_l2norm_in_kernel=True)

    def recurrent(self, q, k, v, g, beta, state, **inside):
        """fla's, which writes the states after the token anew."""
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        return fused_recurrent_gated_delta_rule(q[:, None], k[:, None], v[:, None], g=g[:, None], beta=beta[:, None],
                                                initial_state=state[1:], output_final_state=True, **inside)  # fmt: skip

    def recurrent_step(self, state):
        c = self.case
        return self.recurrent(*self.heads, c.a, c.b, state, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                              use_beta_sigmoid_in_kernel=True, A_log=c.A_log, dt_bias=c.dt_bias)  # fmt: skip

    def cores(self):
        return {named("fla-core", "fused recurrent"): [lambda s=s: self.recurrent(*self.case.x, s) for s in self.states]}

    def steps(self):
        inside = "(gating and l2norm inside, as ours)"
        return {
            named("vllm", f"packed decode {inside}"): [lambda s=s: self.packed(self.case.mixed, s) for s in self.states],
            named("fla-core", f"fused recurrent {inside}"): [lambda s=s: self.recurrent_step(s) for s in self.states],
        }

    def mixers(self):
        layers = zip(self.states, self.case.windows)
        return {named("vllm", "conv update, packed decode, gated norm"): [lambda s=s, w=w: self.mixer(s, w) for s, w in layers]}

    def mixer(self, state, window):
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        c = self.case
        y = causal_conv1d_update(c.mixed, window.transpose(1, 2), c.weight, None, "silu", conv_state_indices=c.slots)
        self.packed(y, state)
        return gated_norm(self.out, c.z, c.norm_weight)
