"""What the architectures share: the step's tokens, and vLLM's modules as the functions and parameters that a model wants."""

from __future__ import annotations

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import unified_attention_with_output

from isoexec.models import qwen3_moe
from isoexec.ops import collective, moe
from isoexec.ops._core import registry
from isoexec.runtimes.vllm import embedding, step


def forward(model, input_ids, inputs_embeds, rope_table, decoder_layer, final_norm):
    """Forward pass of a vLLM model under a contract.

    Args:
        model: vLLM model without its head; its ``layers`` and ``norm`` are used for their parameters only.
        input_ids: [T] token ids, or None with ``inputs_embeds`` [T, D] bf16.
        rope_table: () -> table of the tokens' positions, by ops.
        decoder_layer: (module, x [T, D], residual [T, D] or None in the first layer, table) -> (x, residual), not yet added.
        final_norm: (x, residual, weight, eps) -> [T, D].

    Returns:
        [T, D] bf16, normed.
    """
    with registry.executing(step.begin(max_query_len())):
        x_TD = embed(model, input_ids, inputs_embeds)
        table, residual_TD = rope_table(), None
        for index, layer in enumerate(model.layers):
            with registry.in_layer(index):
                x_TD, residual_TD = decoder_layer(layer, x_TD, residual_TD, table)
        return final_norm(x_TD, residual_TD, model.norm.weight, model.norm.variance_epsilon)


def max_query_len() -> int | None:
    """Tokens of the longest query of the step; None in a profiling run, which has no attention metadata."""
    metadata = get_forward_context().attn_metadata
    return None if metadata is None else next(iter(metadata.values())).max_query_len


def embed(model, input_ids, inputs_embeds):
    """[T, D] bf16 rows of the tokens, or ``inputs_embeds`` where they are given."""
    return embedding.rows(model.embed_tokens, input_ids, tensor_parallel()) if inputs_embeds is None else inputs_embeds


def tensor_parallel() -> collective.TensorParallel | None:
    """The ops' view of vLLM's tensor-parallel group; None for a group of one."""
    group = get_tp_group()
    return collective.TensorParallel(group.device_group) if group.world_size > 1 else None


def expert_parallel() -> moe.ExpertParallel | None:
    """The ranks that share out the experts, which are those of :func:`tensor_parallel` and hold the same tokens; None for one."""
    tp = tensor_parallel()
    return None if tp is None else moe.ExpertParallel(tp.group, replicated=True)


def split_qkv(heads: int, groups: int, size: int):
    """Function from a product [T, (H + 2 G) K] with vLLM's ``qkv_proj`` to views q [T, H, K], k and v [T, G, K]."""

    def split(qkv):
        q, k, v = qkv.split([heads * size, groups * size, groups * size], dim=-1)
        return q.unflatten(-1, (heads, size)), k.unflatten(-1, (groups, size)), v.unflatten(-1, (groups, size))

    return split


def attend(layer):
    """vLLM's attention layer as the function that a model wants.

    The Python function behind vLLM's custom op is called directly: a dispatch mode (the audit) sees through it.
    """

    def attend(q_THK, k_TGK, v_TGK):
        output_THK = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
        unified_attention_with_output(q_THK, k_TGK, v_TGK, output_THK, layer.layer_name)
        return output_THK

    return attend


def sparse_mlp(block, top_k: int, renormalize: bool) -> qwen3_moe.SparseMLP:
    """Routed experts of vLLM's sparse block: ``w13`` holds gate rows then up rows of each expert, as the op reads them."""
    return qwen3_moe.SparseMLP(block.gate.weight, block.experts.w13_weight, block.experts.w2_weight, top_k, renormalize)
