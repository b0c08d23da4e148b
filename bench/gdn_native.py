"""The native kernels that bench/gdn.py times, composed as their projects do: vLLM's for rollout, flash-linear-attention's for training.

On Hopper fla 0.5.1 runs its backward through tilelang only, which takes as many key heads as value heads: queries and keys are repeated, as
the models that train with it do.
"""

from __future__ import annotations

import types

import torch


def tune_quickly(share=0, of=1) -> None:
    """Kernels of this process that tune themselves: a candidate is timed for 20 ms; with ``of`` > 1 none is, and a share is compiled."""
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
        Autotuner.do_bench = lambda self, call, quantiles: do_bench(call, warmup=5, rep=20, quantiles=quantiles)


class Sequence:
    """Packed sequences. ``case`` is bench.gdn.Sequence: its inputs serve both sides."""

    def __init__(self, case):
        from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

        self.case, self.cu = case, case.cu.int()
        self.fresh, self.slots = case.slots < 0, case.slots + 1
        self.tables = types.SimpleNamespace()  # built once per batch, as the engine does
        self.tables.nums_dict, self.tables.batch_ptr, self.tables.token_chunk_offset_ptr = compute_causal_conv1d_metadata(
            torch.tensor(case.plan.offsets), device="cuda"
        )

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

    def mixer_prefill(self):
        from vllm.model_executor.layers.fla.ops.fused_gdn_prefill_post_conv import fused_post_conv_prep
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

        c = self.case
        y = causal_conv1d_fn(c.mixed.T, c.weight, None, c.conv_state.transpose(1, 2), self.cu, cache_indices=self.slots,
                             has_initial_state=self.fresh, metadata=self.tables)  # fmt: skip
        o = self.vllm(*fused_post_conv_prep(y.T, c.a, c.b, c.A_log, c.dt_bias, *c.heads[:1], *c.heads[2:]))
        return gated_norm(o, c.z, c.norm_weight)

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
    """One token per lane. ``case`` is bench.gdn.Decode. Launch sets: one per layer's states."""

    def __init__(self, case):
        H, HV, K, V = case.heads
        self.case = case
        self.states = [torch.randn(case.B + 1, HV, V, K, device="cuda") * 0.05 for _ in range(case.layers)]
        self.out = torch.empty(case.B, 1, HV, V, dtype=torch.bfloat16, device="cuda")

    def core(self, mixed, state):
        from vllm.model_executor.layers.fla.ops.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode as packed

        c = self.case
        scale = c.heads[2] ** -0.5
        return packed(mixed, c.a, c.b, c.A_log, c.dt_bias, scale, state, self.out, c.slots, use_qk_l2norm_in_kernel=True)

    def mixer(self, state, window):
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        c = self.case
        y = causal_conv1d_update(c.mixed, window.transpose(1, 2), c.weight, None, "silu", conv_state_indices=c.slots)
        self.core(y, state)
        return gated_norm(self.out, c.z, c.norm_weight)

    def launches(self):
        return [lambda s=s: self.core(self.case.mixed, s) for s in self.states], [
            lambda s=s, w=w: self.mixer(s, w) for s, w in zip(self.states, self.case.windows)
        ]
