"""vLLM attention backend that runs isoexec's paged attention on vLLM's own KV cache.

Cache of a layer: [blocks, 2, block_size, G, K] bf16, keys then values. Nothing of the schedule depends on the block size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from isoexec.contract import ContractError, active_contract
from isoexec.ops import attention


@dataclass
class Metadata(AttentionMetadata):
    """What one step's attention needs; shapes as in :func:`isoexec.ops.attention.paged`."""

    num_actual_tokens: int
    max_query_len: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        m = common_attn_metadata
        if common_prefix_len or not m.causal:
            raise ContractError(
                f"attention.paged: expected causal attention without a common-prefix cascade, found a common prefix of {common_prefix_len} "
                f"tokens and causal={m.causal}; pass disable_cascade_attn=True and a causal model"
            )
        most = int(m.query_start_loc_cpu[: m.num_reqs + 1].diff().max())
        if most > m.max_query_len:
            raise ContractError(
                f"attention.paged: max_query_len: expected {most} or more, the new tokens of a sequence of the step, found {m.max_query_len}; "
                "rows beyond it would not be computed: report the engine's settings"
            )
        return Metadata(
            num_actual_tokens=m.num_actual_tokens,
            max_query_len=m.max_query_len,
            block_table=m.block_table_tensor[: m.num_reqs],
            seq_lens=m.seq_lens[: m.num_reqs],
            query_start_loc=m.query_start_loc[: m.num_reqs + 1],
            slot_mapping=m.slot_mapping[: m.num_actual_tokens],
        )

    def build_for_cudagraph_capture(self, common_attn_metadata) -> Metadata:
        """As ``build``. A graph keeps the bound of its capture, and every step that vLLM replays has one new token a sequence."""
        if common_attn_metadata.max_query_len != 1:
            raise ContractError(
                f"attention.paged: max_query_len: expected 1 in a step that is captured, found {common_attn_metadata.max_query_len}; "
                "pass cudagraph_mode FULL_DECODE_ONLY"
            )
        return self.build(0, common_attn_metadata)


class Backend(AttentionBackend):
    supported_dtypes = [torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return Implementation

    @staticmethod
    def get_builder_cls():
        return MetadataBuilder

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def use_cascade_attention(*args, **kwargs) -> bool:
        return False


class Implementation(AttentionImpl):
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        **extra,
    ):
        contract = active_contract()
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_block = contract.numerics.kv_block
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **extra,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise ContractError(f"attention.paged: {name}: expected None, found {value!r}; this model is outside the contract")
        if attn_type != AttentionType.DECODER:
            raise ContractError(f"attention.paged: attn_type: expected {AttentionType.DECODER!r}, found {attn_type!r}")

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        """Store the step's keys and values, then attend. query [T, H, K]; key, value [T, G, K]; output as query, filled in place."""
        if attn_metadata is None:  # profiling run: no cache exists yet
            return output.zero_()
        n, m = attn_metadata.num_actual_tokens, attn_metadata
        key_cache, value_cache = kv_cache.unbind(1)
        attention.write_cache(key[:n], value[:n], key_cache, value_cache, m.slot_mapping)
        output[:n] = attention.paged(
            query[:n],
            key_cache,
            value_cache,
            m.block_table,
            m.seq_lens,
            m.query_start_loc,
            scale=self.scale,
            kv_block=self.kv_block,
            longest=m.max_query_len,
        )
        output[n:].zero_()
        return output
