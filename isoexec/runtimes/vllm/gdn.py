"""State of Gated DeltaNet layers in vLLM's cache: its shapes, each step's metadata, and the callbacks that run the ops on it.

A page of a layer holds one sequence's state: the last inputs of the convolution, then the fields of the op library's state pool (the
boundary state of the last complete chunk as two planes of fp32, and the rows of the open chunk). Chunks are aligned to absolute
position 0, so a sequence may be cut anywhere between two steps. Where a cache block ends and its state is kept for other sequences,
no chunk is open: blocks are whole chunks, else refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, mamba_get_block_table_tensor

from isoexec.contract import ContractError, ExecutionContract, active_contract
from isoexec.ops import gdn


class Form(NamedTuple):
    """The ops of one form of the core, and the pool they keep a sequence's state in."""

    pool: type
    prefill: Callable
    decode: Callable


#: ``numerics.gdn_form`` -> ops. settings.check refuses a form that is not here.
FORMS = {form: Form(pool, getattr(gdn, f"{form}_prefill"), getattr(gdn, f"{form}_decode")) for form, pool in gdn.POOLS.items()}


def state_shapes(contract: ExecutionContract, key_heads: int, value_heads: int, key_dim: int, value_dim: int, taps: int):
    """Shapes of a sequence's state in one layer: convolution window, then the pool's fields. Heads are this rank's."""
    spec = _pool_spec(contract, key_heads, value_heads, key_dim, value_dim)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return (taps - 1, channels), *(shape for shape, _ in spec)


def state_dtypes(contract: ExecutionContract):
    """Dtypes of what :func:`state_shapes` lists. They are the op's: no setting of the engine rounds a state."""
    return torch.bfloat16, *(dtype for _, dtype in _pool_spec(contract, 1, 1, 16, 16))


def state_copy_functions(contract: ExecutionContract):
    """vLLM's copy function of each state: at a block's end the whole state is taken."""
    return (get_temporal_copy_spec,) * len(state_dtypes(contract))


def _pool_spec(contract, *sizes):
    numerics = contract.numerics
    return FORMS[numerics.gdn_form].pool.spec(*sizes, numerics.gdn_chunk).values()


@dataclass
class Metadata(AttentionMetadata):
    """What one step's Gated DeltaNet layers need.

    Attributes:
        num_actual_tokens: rows that are tokens, or lanes of a captured step; the rest is padding.
        max_query_len: tokens of the longest sequence piece of the step.
        plan: the pieces of the step's sequences; None in a step of single tokens, whose ops read none.
        slots: [N] int32, page of each sequence; -1 on lanes that pad a captured step.
        positions: [N] int32, absolute position of each sequence's first token in this step.
    """

    num_actual_tokens: int
    max_query_len: int
    plan: gdn.Plan | None
    slots: torch.Tensor
    positions: torch.Tensor

    @property
    def decode(self) -> bool:
        """Every sequence brings one token."""
        return self.plan is None


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Slots and positions lie in buffers that are filled before each step: the kernels of a captured one read them where they were."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.chunk = active_contract().numerics.gdn_chunk
        self.cache_mode = vllm_config.cache_config.mamba_cache_mode
        if self.cache_mode != "none" and kv_cache_spec.block_size % self.chunk:
            raise ContractError(
                f"op gdn: block_size: expected a multiple of numerics.gdn_chunk {self.chunk}, found {kv_cache_spec.block_size}: a cached "
                "state would lie inside a chunk; set block_size to such a multiple, or enable_prefix_caching=False"
            )
        sequences = vllm_config.scheduler_config.max_num_seqs
        self._slots, self._positions = (torch.zeros(sequences, dtype=torch.int32, device=device) for _ in range(2))

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        m = common_attn_metadata
        lengths = m.query_start_loc_cpu.diff()
        starts = m.seq_lens_cpu_upper_bound - lengths  # exact: the contract refuses speculative decoding
        table = mamba_get_block_table_tensor(m.block_table_tensor, m.seq_lens, self.kv_cache_spec, self.cache_mode)
        slots = self._slots[: m.num_reqs].copy_(table[: m.num_reqs, 0])
        positions = self._positions[: m.num_reqs].copy_(m.compute_num_computed_tokens())
        if m.max_query_len > 1:
            plan = gdn.Plan(lengths.tolist(), self.chunk, starts.tolist(), self.device)
        else:
            plan = None
            # A lane whose token is stored nowhere is padding, or vLLM's dummy step, whose table still names pages of finished sequences.
            slots.masked_fill_(m.slot_mapping[: m.num_reqs] < 0, -1)
            if bool(((starts == 0) & (lengths == 1)).any()):
                self._empty_windows(torch.where((positions == 0) & (slots >= 0), slots, NULL_BLOCK_ID))
        return Metadata(m.num_actual_tokens, m.max_query_len, plan, slots, positions)

    def _empty_windows(self, slots) -> None:
        """Zeros in the windows of ``slots``: a sequence that begins in a step of single tokens finds a page of another one.

        vLLM's null block is no sequence's: it stands for those that need none.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            layers[name].kv_cache[0][slots] = 0


class Backend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "GDN_ATTN"

    @staticmethod
    def get_builder_cls():
        return MetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


def callbacks(layer, contract: ExecutionContract):
    """(convolve, mix) of :func:`isoexec.models.qwen3_5.gdn_block` on the pages of one layer in the current step.

    A step of single tokens runs the decode ops, every other one the prefill ops, in which a decoding sequence is a piece of one token.

    Args:
        layer: vLLM ``QwenGatedDeltaNetAttention``; its ``kv_cache`` is a list in the order of :func:`state_shapes`.
        contract: the contract that the model was built under.
    """
    metadata = get_forward_context().attn_metadata
    if metadata is None:  # profiling run: no cache exists yet
        return (lambda qkv, weight: torch.zeros_like(qkv)), (lambda q, k, v, g, beta: torch.zeros_like(v))
    m: Metadata = metadata[layer.prefix]
    windows, *fields = layer.kv_cache
    form = FORMS[contract.numerics.gdn_form]
    pool, n = form.pool(*fields), m.num_actual_tokens

    if m.decode:

        def convolve(qkv_TC, weight):
            return _filled(gdn.conv1d_step(qkv_TC[:n], weight, windows, m.slots), qkv_TC)

        def mix(q, k, v, g, beta):
            return _filled(form.decode(*_rows(n, q, k, v, g, beta), pool, m.slots, m.positions), v)
    else:

        def convolve(qkv_TC, weight):
            y_TC, windows[m.slots] = gdn.conv1d(qkv_TC[:n], weight, m.plan, windows[m.slots])
            return _filled(y_TC, qkv_TC)

        def mix(q, k, v, g, beta):
            return _filled(form.prefill(*_rows(n, q, k, v, g, beta), m.plan, pool, m.slots), v)

    return convolve, mix


def _rows(n, *tensors):
    return (x[:n] for x in tensors)


def _filled(y, like):
    """``y`` with rows of zeros for the padding of ``like``."""
    if y.shape[0] == like.shape[0]:
        return y
    out = like.new_zeros(like.shape)
    out[: y.shape[0]] = y
    return out
