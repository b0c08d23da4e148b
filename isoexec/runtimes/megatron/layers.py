"""What the layers of every architecture share under a contract."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from isoexec.contract import ContractError, ExecutionContract
from isoexec.ops import attention, norm
from isoexec.ops._core import registry
from isoexec.runtimes.megatron import modules, packing

Tensor = torch.Tensor


class ContractLayer(TransformerLayer):
    """A ``TransformerLayer`` with upstream's parameters (names, shapes, sharding) whose forward is one of :mod:`isoexec.models`.

    Between layers the hidden state is one bf16 tensor [S, 1, D], the residual stream with the layer's output added. Without sequence
    parallelism S is T, the tokens of the micro-batch.
    """

    def __init__(self, config, submodules, contract: ExecutionContract, **kwargs):
        super().__init__(config, submodules, **kwargs)
        self.numerics = contract.numerics
        self.tensor_parallel = modules.tensor_parallel(self.tp_group, config.sequence_parallel)

    def forward(self, hidden_states, attention_mask=None, *, rotary_pos_emb, packed_seq_params=None, **unused):
        """[S, 1, D] bf16 -> ([S, 1, D] bf16, None); a token sees the earlier ones of its sequence in ``packed_seq_params``.

        ``GPTModel`` refuses what the unused arguments would ask for.

        Raises:
            ContractError: more than one batch row.
        """
        if hidden_states.shape[1] != 1:
            raise ContractError(f"hidden_states: expected [tokens, 1, hidden], found {tuple(hidden_states.shape)}; pack the sequences")
        cos, sin = rotary_pos_emb
        bounds = packing.bounds_of(packed_seq_params, cos.shape[0], cos.device)
        with registry.in_layer(self.layer_number - 1):
            x, residual = self.compute(hidden_states.squeeze(1), (cos, sin), bounds)
            return norm.residual_add(x, residual).unsqueeze(1), None

    def compute(self, x: Tensor, rope_table: tuple[Tensor, Tensor], bounds: packing.Bounds) -> tuple[Tensor, Tensor]:
        """(x [S, D], residual [S, D]) of the layer, not yet added.

        Args:
            x: [S, D] bf16, the residual stream.
            rope_table: (cos, sin) of the micro-batch's tokens.
            bounds: where its sequences begin and end.
        """
        raise NotImplementedError

    def attend(self, bounds: packing.Bounds) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The models' attention callback: causal within each packed sequence."""
        return functools.partial(
            attention.varlen,
            cu_seqlens=bounds.cu_seqlens,
            scale=self.head_size**-0.5,
            kv_block=self.numerics.kv_block,
            longest=bounds.longest,  # what its gradients take memory by
        )

    @property
    def head_size(self) -> int:
        """Channels of a query."""
        return self.config.kv_channels


def split_grouped_qkv(qkv: Tensor, heads: int, groups: int, head_size: int) -> tuple[Tensor, ...]:
    """Take apart a product with Megatron's grouped weight, whose rows are (q ..., k, v) per key/value head, with output gates
    (q ..., gate ..., k, v).

    Args:
        qkv: [T, (H + 2 G) K], with gates [T, (2 H + 2 G) K].

    Returns:
        q [T, H, K], with gates also gate [T, H, K], then k and v [T, G, K].
    """
    grouped = qkv.view(qkv.shape[0], groups, -1, head_size)
    *by_kind, k, v = grouped.split([heads // groups] * ((grouped.shape[2] - 2) * groups // heads) + [1, 1], 2)
    return *(part.flatten(1, 2) for part in by_kind), k.squeeze(2), v.squeeze(2)


def attention_parameters(att: SelfAttention) -> dict:
    """Fields that the models' attention takes, under their names."""
    return dict(
        qkv=att.linear_qkv(),
        split_qkv=functools.partial(
            split_grouped_qkv,
            heads=att.num_attention_heads_per_partition,
            groups=att.num_query_groups_per_partition,
            head_size=att.hidden_size_per_attention_head,
        ),
        q_norm=att.q_layernorm(),
        k_norm=att.k_layernorm(),
        o=att.linear_proj(),
    )


def attention_spec() -> ModuleSpec:
    """Self-attention that holds parameters."""
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=modules.ColumnWeight,
            core_attention=modules.NoAttention,
            linear_proj=modules.RowWeight,
            q_layernorm=modules.NormWeight,
            k_layernorm=modules.NormWeight,
        ),
    )


def mlp_submodules() -> MLPSubmodules:
    """Two matrices that hold parameters."""
    return MLPSubmodules(linear_fc1=modules.ColumnWeight, linear_fc2=modules.RowWeight)


def dense_mlp():
    """Builder of an MLP that holds parameters."""
    return functools.partial(MLP.as_mlp_submodule, submodules=mlp_submodules())


def layer_spec(layer: type, contract: ExecutionContract, mixer: ModuleSpec, mlp, mixer_input: str | None = "linear_qkv") -> ModuleSpec:
    """Spec of a :class:`ContractLayer`; ``mixer_input``: the mixer's first matrix, if distributed checkpoints keep norms with it."""
    return ModuleSpec(
        module=layer,
        params={"contract": contract},
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.NormWeight,
            self_attention=mixer,
            pre_mlp_layernorm=modules.NormWeight,
            mlp=mlp,
            # Names in distributed checkpoints, as upstream's own specs write them.
            sharded_state_dict_keys_map=(
                {
                    "input_layernorm.": f"self_attention.{mixer_input}.layer_norm_",
                    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
                }
                if mixer_input
                else {}
            ),
        ),
    )
