"""Token embedding and vocabulary head of vLLM's vocabulary-parallel layers."""

from __future__ import annotations

import torch
import torch.distributed as dist

from isoexec.contract import ContractError
from isoexec.ops import collective, matmul
from isoexec.ops.embedding import embedding as embed
from isoexec.runtimes.vllm import step


def embedding(layer, ids):
    """Rows of ``layer.weight`` [V, D] for ``ids`` [T]: [T, D] bf16. Runs inside a forward pass, which has set the case."""
    return embed(ids, layer.weight)


def rows(layer, ids, tp=None):
    """[T, D] bf16 of the tokens ``ids`` [T] from a vocabulary that the ranks of ``tp`` share out; upstream would add zeros to each."""
    if tp is None:
        return layer(ids)
    owner = ids // layer.num_embeddings_per_partition
    local = torch.where(owner == dist.get_rank(tp.group), ids - layer.shard_indices.org_vocab_start_index, 0)
    return collective.rows_of_owners(embed(local, layer.weight), owner, tp=tp)


def lm_head(layer, x, bias=None):
    """Logits [T, V] fp32 of ``x`` [T, D] bf16; vLLM's logits processor takes them as they are.

    Raises:
        ContractError: the head has a bias.
    """
    if bias is not None:
        raise ContractError("matmul.lm_head: bias: expected None, found a tensor; no architecture under a contract has one")
    step.begin_head()
    with step.executing():
        return matmul.lm_head(x, layer.weight)
