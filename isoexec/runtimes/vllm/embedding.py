"""Token embedding and vocabulary head of vLLM's vocabulary-parallel layers."""

from __future__ import annotations

from isoexec.contract import ContractError
from isoexec.ops import matmul
from isoexec.ops.embedding import embedding as embed
from isoexec.runtimes.vllm import step


def embedding(layer, ids):
    """Rows of ``layer.weight`` [V, D] for ``ids`` [T]: [T, D] bf16. Runs inside a forward pass, which has set the case."""
    return embed(ids, layer.weight)


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
