"""The decoder under a contract: Megatron modules hold the parameters, :mod:`isoexec.models` computes."""

from __future__ import annotations

import functools

import torch
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import get_pg_rank

from isoexec.contract import ContractError, ExecutionContract
from isoexec.models import qwen3
from isoexec.ops import attention, norm
from isoexec.runtimes.megatron import modules


def split_grouped_qkv(qkv: torch.Tensor, heads: int, groups: int, head_size: int):
    """Take apart a product with Megatron's grouped weight, whose rows are (q ..., k, v) per key/value head.

    Args:
        qkv: [T, (H + 2 G) K].

    Returns:
        q [T, H, K], k [T, G, K], v [T, G, K].
    """
    per_group = heads // groups
    grouped = qkv.view(qkv.shape[0], groups, per_group + 2, head_size)
    return grouped[:, :, :per_group].flatten(1, 2), grouped[:, :, per_group], grouped[:, :, per_group + 1]


class Qwen3TransformerLayer(TransformerLayer):
    """A ``TransformerLayer`` with upstream's parameters (names, shapes, sharding) whose forward is :func:`qwen3.decoder_layer`.

    Between layers the hidden state is one bf16 tensor [S, 1, D], the residual stream with the layer's output added.
    """

    def __init__(self, config, submodules, contract: ExecutionContract, **kwargs):
        super().__init__(config, submodules, **kwargs)
        self.numerics = contract.numerics
        self.tensor_parallel = modules.tensor_parallel(self.tp_group, config.sequence_parallel)

    def forward(self, hidden_states, attention_mask=None, *, rotary_pos_emb, packed_seq_params=None, inference_context=None, **unused):
        """[S, 1, D] bf16 -> ([S, 1, D] bf16, None).

        ``attention_mask`` is not read: attention is causal within the sequences of ``packed_seq_params``.

        Raises:
            ContractError: more than one batch row, or inference.
        """
        if hidden_states.shape[1] != 1:
            raise ContractError(f"hidden_states: expected [tokens, 1, hidden], found {tuple(hidden_states.shape)}; pack the sequences")
        if inference_context is not None:
            raise ContractError("inference_context: expected None, found Megatron inference; generate with the rollout engine")
        cos, sin = rotary_pos_emb
        attend = functools.partial(
            attention.varlen,
            cu_seqlens=modules.cu_seqlens(packed_seq_params, cos.shape[0]),
            scale=self.config.kv_channels**-0.5,
            kv_block=self.numerics.kv_block,
        )
        x, residual = qwen3.decoder_layer(
            hidden_states.squeeze(1), None, self.parameters_of_layer(), (cos, sin), attend, self.numerics, self.tensor_parallel
        )
        return norm.residual_add(x, residual).unsqueeze(1), None

    def parameters_of_layer(self) -> qwen3.Qwen3Layer:
        """This rank's parameters, in the model's names."""
        att, mlp = self.self_attention, self.mlp
        return qwen3.Qwen3Layer(
            input_norm=self.input_layernorm(),
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
            post_attention_norm=self.pre_mlp_layernorm(),
            gate_up=mlp.linear_fc1(),
            down=mlp.linear_fc2(),
            eps=self.config.layernorm_epsilon,
        )


def _qwen3_layer_spec(contract: ExecutionContract) -> ModuleSpec:
    return ModuleSpec(
        module=Qwen3TransformerLayer,
        params={"contract": contract},
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.NormWeight,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=modules.ColumnWeight,
                    core_attention=modules.NoAttention,
                    linear_proj=modules.RowWeight,
                    q_layernorm=modules.NormWeight,
                    k_layernorm=modules.NormWeight,
                ),
            ),
            pre_mlp_layernorm=modules.NormWeight,
            mlp=functools.partial(
                MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=modules.ColumnWeight, linear_fc2=modules.RowWeight)
            ),
            # Names in distributed checkpoints, as upstream's own specs write them.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


_LAYERS = {"Qwen3ForCausalLM": _qwen3_layer_spec}


def decoder_spec(contract: ExecutionContract, config, vp_stage, pg_collection) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage and the final norm."""
    layer = _LAYERS[contract.architecture](contract)
    count = get_num_layers_to_build(config, vp_stage, get_pg_rank(pg_collection.pp))
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=modules.RMSNorm)
