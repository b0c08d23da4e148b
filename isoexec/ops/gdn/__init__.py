"""Gated DeltaNet: causal convolution, gating, l2norm and the delta-rule core, for trainer, prefill and decode.

The core has two forms, one of which a contract names: `cpr_wy` (reference.py) and `cpr` (reference_cpr.py).

One chunk size C serves every case (a contract constant). Per value head, with S_t [V, K]:
S_t = e^{g_t} S_{t-1} + beta_t (v_t - e^{g_t} S_{t-1} k_t) k_t^T,  o_t = scale S_t q_t.
Source: Gated Delta Networks (arXiv 2412.06464); the schedule is docs/gdn.md and docs/schedule.md.
"""

from __future__ import annotations

import torch

from isoexec.ops._core.registry import op
from isoexec.ops.gdn.state import Plan, RecurrentPool, StatePool, join_planes, split_planes

__all__ = ["POOLS", "Plan", "RecurrentPool", "StatePool", "conv1d", "conv1d_step", "cpr", "cpr_decode", "cpr_prefill",
           "cpr_wy", "cpr_wy_decode", "cpr_wy_prefill", "cpr_wy_step", "gating", "join_planes", "l2norm", "mixer_inputs",
           "mixer_step", "mixer_step_inputs", "split_planes"]  # fmt: skip

#: Form of the core -> what a sequence's state lies in; its ops are `<form>` (trainer), `<form>_prefill` and `<form>_decode`.
POOLS = {"cpr": RecurrentPool, "cpr_wy": StatePool}

_CORE_HAZARDS = (
    "the cumulative decay is one sequential fp32 sum in every case",
    "rows that are not there yet are +0.0 by selection, never by multiplication",
    "0 * inf in a tile product reaches earlier rows: non-finite rows are refused",
    "a slot's stale contents must not enter a new sequence",
    "index arithmetic on the pool overflows int32",
)


@op("gdn.conv1d", cpu=".reference_conv:conv1d", cuda=".triton_edges:conv1d")
def conv1d(x: torch.Tensor, weight: torch.Tensor, plan: Plan, window: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution with silu over a packed batch.

    Args:
        x: [T, D] bf16.
        weight: [D, W] bf16, oldest tap first.
        plan: the batch; a sequence whose start is 0 has zeros before it.
        window: [N, W-1, D] bf16, the last W-1 inputs of each sequence (None: all start here).

    Returns:
        y [T, D] bf16 = bf16(silu(fp32 sum, oldest tap first)); the window after the last token, [N, W-1, D].
    """


@op("gdn.conv1d_step", cpu=".reference_conv:conv1d_step", cuda=".triton_edges:conv1d_step")
def conv1d_step(x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, slots: torch.Tensor, null_slot: int = -1) -> torch.Tensor:
    """One token per lane. x [B, D]; window [slots, W-1, D], advanced in place; slots [B] int32, < 0 or null_slot: inert."""


@op("gdn.gating", cpu=".reference_conv:gating", cuda=".triton_edges:gating",
    hazards=("A_log and dt_bias are fp32: exp(A_log) in bf16 is another number",))  # fmt: skip
def gating(a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [T, HV] bf16; A_log, dt_bias [HV] fp32 -> g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), fp32."""


@op("gdn.l2norm", cpu=".reference_conv:l2norm", cuda=".triton_edges:l2norm")
def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., K] bf16 -> bf16(x rsqrt(sum x^2 + eps)), the sum by the fixed row sum."""


@op("gdn.mixer_inputs", cpu=".reference_conv:mixer_inputs", cuda=".triton_edges:mixer_inputs")
def mixer_inputs(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    plan: Plan,
    H: int,
    HV: int,
    K: int,
    V: int,
    window: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, ...]:
    """`conv1d` of the channels (q heads, k heads, v heads), `l2norm` of q and k, `gating`: one kernel on a GPU, the same bits.

    x [T, 2HK + HV V] bf16, a, b [T, HV] bf16; the rest as in those ops -> q, k [T, H, K], v [T, HV, V], g, beta [T, HV], window.
    """


@op("gdn.mixer_step_inputs", cpu=".reference_conv:mixer_step_inputs", cuda=".triton_edges:mixer_step_inputs")
def mixer_step_inputs(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    H: int,
    HV: int,
    K: int,
    V: int,
    null_slot: int = -1,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, ...]:
    """`mixer_inputs` for one token per lane; ``window`` [slots, W-1, D] advanced in place -> q, k, v, g, beta."""


@op("gdn.cpr_wy", cpu=".cpu:train", cuda=".triton_core:train", hazards=_CORE_HAZARDS)
def cpr_wy(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    plan: Plan,
    scale: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Trainer: whole sequences, packed, differentiable in q, k, v, g, beta.

    Args:
        q, k: [T, H, K] bf16, l2-normalised.
        v: [T, HV, V] bf16; value head h reads key head h // (HV // H).
        g, beta: [T, HV] fp32; g <= 0, beta in [0, 1].
        plan: lengths of the packed sequences, all starting at position 0, and C.
        scale: of the query, K**-0.5 by default.
        out_dtype: bf16, or fp32 for the value before the rounding.

    Returns:
        o [T, HV, V].

    Raises:
        ContractError: a row is not finite, leaves fp32 inside its chunk, or lies outside the domain (an element of k beyond 2, g > 0,
            beta outside [0, 1]). On the CPU; on a GPU a row that is not finite makes its own output not finite.
    """


@op("gdn.cpr_wy_prefill", cpu=".cpu:prefill", cuda=".triton_core:prefill", hazards=_CORE_HAZARDS)
def cpr_wy_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    plan: Plan,
    pool: StatePool,
    slots: torch.Tensor,
    scale: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """A piece of each sequence: resumes ``slots`` [N] int32 at ``plan.starts`` and advances them in place. As `cpr_wy`."""


@op("gdn.cpr_wy_decode", cpu=".cpu:decode", cuda=".triton_decode:decode", hazards=_CORE_HAZARDS)
def cpr_wy_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: StatePool,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float | None = None,
    null_slot: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """One token per lane. q, k [B, H, K], v [B, HV, V], g, beta [B, HV]; slots, positions [B] int32: the lane's slot (< 0 or
    null_slot: inert, its output is +0.0) and the token's absolute position. Advances the slots in place -> o [B, HV, V]."""


@op("gdn.cpr_wy_step", cpu=".reference_step:step", cuda=".triton_decode:step", hazards=_CORE_HAZARDS)
def cpr_wy_step(
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    pool: StatePool,
    slots: torch.Tensor,
    positions: torch.Tensor,
    H: int,
    HV: int,
    K: int,
    V: int,
    scale: float | None = None,
    null_slot: int = -1,
    eps: float = 1e-6,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`l2norm` of q and k, `gating` and `cpr_wy_decode` of convolved channels y [B, 2HK + HV V]: the same bits, no launch more on a GPU."""


@op("gdn.mixer_step", cpu=".reference_step:mixer_step", cuda=".triton_decode:mixer_step", hazards=_CORE_HAZARDS)
def mixer_step(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    window: torch.Tensor,
    pool: StatePool,
    slots: torch.Tensor,
    positions: torch.Tensor,
    H: int,
    HV: int,
    K: int,
    V: int,
    scale: float | None = None,
    null_slot: int = -1,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> torch.Tensor:
    """All of a decode step between the projections: `conv1d_step`, `cpr_wy_step` and ``norm.gated_rms_norm``, in two launches on a GPU.

    x [B, 2HK + HV V] bf16, z [B, HV, V] bf16, norm_weight [V], window as in `conv1d_step` -> [B, HV, V] bf16, the same bits as the ops
    apart; +0.0 on inert lanes.
    """


@op("gdn.cpr", cpu=".reference_cpr:train", cuda=".triton_cpr:train", hazards=_CORE_HAZARDS)
def cpr(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    plan: Plan,
    scale: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Trainer, form `cpr`: a token recurrence inside chunks, from the boundary states of `cpr_wy`. Arguments and result as `cpr_wy`."""


@op("gdn.cpr_prefill", cpu=".reference_cpr:prefill", cuda=".triton_cpr:prefill", hazards=_CORE_HAZARDS)
def cpr_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    plan: Plan,
    pool: RecurrentPool,
    slots: torch.Tensor,
    scale: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """A piece of each sequence; as `cpr_wy_prefill`, on the pool of this form."""


@op("gdn.cpr_decode", cpu=".reference_cpr:decode", cuda=".triton_cpr:decode", hazards=_CORE_HAZARDS)
def cpr_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: RecurrentPool,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float | None = None,
    null_slot: int = -1,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """One token per lane; as `cpr_wy_decode`, on the pool of this form."""
