"""Gated DeltaNet under a contract: Megatron's module holds the parameters, two callbacks place the packed sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec

from isoexec.contract import ContractError, Numerics
from isoexec.models import qwen3_5
from isoexec.ops import gdn
from isoexec.runtimes.megatron import modules

Tensor = torch.Tensor

FP32_PARAMETERS = ("A_log", "dt_bias")

#: Form of the core -> the trainer's op.
_CORES = {"cpr": gdn.cpr, "cpr_wy": gdn.cpr_wy}


class ConvWeight(torch.nn.Conv1d):
    """[C, W] bf16, channels sharded within queries, keys and values."""

    def forward(self) -> Tensor:
        return self.weight.squeeze(1)


class GatedDeltaNetWeights(GatedDeltaNet):
    """Upstream's parameters, but that ``A_log`` and ``dt_bias`` are fp32 and stay so when the model is cast."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        channels = self.conv1d.in_channels
        placed = dict(device=self.conv1d.weight.device, dtype=self.config.params_dtype)
        conv = ConvWeight(channels, channels, self.conv_kernel_dim, groups=channels, bias=False, **placed)
        self.conv1d = _keeping_attributes(conv, self.conv1d)
        for name in FP32_PARAMETERS:
            before = getattr(self, name)
            setattr(self, name, _like(before, torch.nn.Parameter(before.detach().float())))

    def _apply(self, fn, recurse=True):
        """Casts and moves of the whole model: fp32 parameters move and keep their values."""
        kept = {name: getattr(self, name).detach() for name in FP32_PARAMETERS}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            parameter = getattr(self, name)
            if parameter.dtype != value.dtype:
                parameter.data = value.to(parameter.device)
        return self

    def forward(self) -> qwen3_5.GatedDeltaNet:
        for name in FP32_PARAMETERS:
            if getattr(self, name).dtype != torch.float32:
                raise ContractError(
                    f"{name}: expected torch.float32, found {getattr(self, name).dtype}: exp of a rounded exponent is another decay; cast "
                    "the model with its modules' own methods, or leave this parameter out"
                )
        norm = self.out_norm()
        if self.tp_size > 1 and not self.config.sequence_parallel:
            # Each rank's heads give a part of its gradient; with sequence parallelism upstream adds the parts itself.
            norm = copy_to_tensor_model_parallel_region(norm, group=self.pg_collection.tp)
        return qwen3_5.GatedDeltaNet(
            in_proj=(self.in_proj(),),
            split=functools.partial(
                split_in_proj, keys=self.qk_dim_local_tp, values=self.v_dim_local_tp, value_size=self.value_head_dim
            ),
            conv=self.conv1d(),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            norm=norm,
            out_proj=self.out_proj(),
            key_dim=self.key_head_dim,
            value_dim=self.value_head_dim,
            eps=self.config.layernorm_epsilon,
        )


def _keeping_attributes(new: torch.nn.Conv1d, old: torch.nn.Conv1d) -> torch.nn.Conv1d:
    _like(old.weight, new.weight)
    return new


def _like(old: torch.nn.Parameter, new: torch.nn.Parameter) -> torch.nn.Parameter:
    """``new`` with the attributes by which Megatron knows how a parameter is sharded."""
    vars(new).update(vars(old))
    return new


def split_in_proj(product: Tensor, keys: int, values: int, value_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take apart a product with ``in_proj``, whose rows are q, k, v, z, b, a.

    Args:
        product: [T, 2 keys + 2 values + 2 J], J = values / value_size.

    Returns:
        qkv [T, 2 keys + values], z [T, J, value_size], b and a [T, J].
    """
    heads = values // value_size
    qkv, z, b, a = product.split((2 * keys + values, values, heads, heads), -1)
    return qkv, z.unflatten(-1, (heads, value_size)), b, a


def callbacks(cu_seqlens: tuple[int, ...], numerics: Numerics, device: torch.device) -> tuple[Callable, Callable]:
    """(convolve, mix) of whole packed sequences, as :func:`isoexec.models.qwen3_5.gdn_block` calls them."""
    core = _CORES[numerics.gdn_form]
    plan = _plan(cu_seqlens, numerics.gdn_chunk, device)
    return lambda qkv, weight: gdn.conv1d(qkv, weight, plan)[0], lambda q, k, v, g, beta: core(q, k, v, g, beta, plan)


@functools.lru_cache(maxsize=8)
def _plan(cu_seqlens: tuple[int, ...], chunk: int, device: torch.device) -> gdn.Plan:
    """Built once per micro-batch and shared by its layers."""
    return gdn.Plan.from_cu_seqlens(cu_seqlens, chunk, device=device)


def gated_delta_net_spec() -> ModuleSpec:
    """Gated DeltaNet that holds parameters."""
    return ModuleSpec(
        module=GatedDeltaNetWeights,
        submodules=GatedDeltaNetSubmodules(in_proj=modules.ColumnWeight, out_norm=modules.NormWeight, out_proj=modules.RowWeight),
    )
