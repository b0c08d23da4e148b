"""How many cache blocks an engine needs, hybrids included.

In a hybrid, attention blocks and states of Gated DeltaNet layers are pages of one size from one pool. vLLM enlarges the block until a
page holds a state, and counts blocks of a pool that several layer groups share; this module follows it. Without a contract the state
of the default form is counted, which is larger than upstream's, so that a verification's two arms run on the same blocks.
"""

from __future__ import annotations

from math import prod

from isoexec.contract import Numerics
from isoexec.ops.gdn import POOLS

_BF16 = 2


def blocks(
    config: dict, numerics: Numerics, block_size: int, cache_tokens: int | None, max_num_seqs: int, max_model_len: int, prefix_caching: bool
) -> tuple[int, int]:
    """(tokens of a block, blocks of the pool).

    Args:
        config: HF config.
        numerics: constants of the contract; without one, its defaults.
        block_size: wished; a hybrid's is a multiple.
        cache_tokens: tokens that all blocks together hold, of which a state takes a block; None: every sequence at full length.
        max_num_seqs, max_model_len, prefix_caching: of the engine.
    """
    text = config.get("text_config", config)
    types = text.get("layer_types") or []
    linear = types.count("linear_attention")
    if not linear:
        attention_groups, state_groups = 1, 0
    else:
        block_size *= -(-_state_bytes(text, numerics) // (block_size * _token_bytes(text)))
        attention_groups, state_groups = _groups(len(types) - linear, linear)
    if cache_tokens is None:
        of_a_sequence = -(-max_model_len // block_size)
        # With a prefix cache the state at a block's end stays while the next block's is written.
        states = (of_a_sequence + 1 if prefix_caching else 1) * state_groups
        wanted = max_num_seqs * (of_a_sequence * attention_groups + states)
    else:
        wanted = cache_tokens // block_size
    return block_size, wanted + 1  # vLLM keeps one block as a null block


def _token_bytes(text: dict) -> int:
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return 2 * text["num_key_value_heads"] * head_dim * _BF16


def _state_bytes(text: dict, numerics: Numerics) -> int:
    H, HV = text["linear_num_key_heads"], text["linear_num_value_heads"]
    K, V = text["linear_key_head_dim"], text["linear_value_head_dim"]
    window = (text["linear_conv_kernel_dim"] - 1) * (2 * H * K + HV * V) * _BF16
    pool = POOLS[numerics.gdn_form].spec(H, HV, K, V, numerics.gdn_chunk)
    return window + sum(prod(shape) * dtype.itemsize for shape, dtype in pool.values())


def _groups(attention: int, linear: int) -> tuple[int, int]:
    """Layer groups of each kind, as vLLM forms them: equal groups of as many layers as the rarer kind has."""
    few, many = sorted((attention, linear))
    size = many if many < 1.5 * few else few
    size = size or many
    return -(-attention // size), -(-linear // size)
