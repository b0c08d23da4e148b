"""State of Gated DeltaNet in a paged pool, and the chunk tables of a packed batch.

A slot holds the boundary state S of the last complete chunk and the rows of the open chunk. S is fp32 kept as two 16-bit planes:
the high one *is* the bf16 operand of every matrix product that reads S, so decode reads half the bytes, and no second copy exists.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from isoexec.contract import ContractError

CHUNK_SIZES = (16, 32, 64)
BLOCK = 64  # tokens between the boundary states that the trainer's forward keeps for its backward


def split_planes(S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 ``S`` -> (high plane bf16, low plane int16), lossless.

    high = (bits + 0x8000) >> 16, round to nearest with ties away from zero. Ties to even would not do: two values whose low
    halves are equal could share a high plane.
    """
    bits = S.contiguous().view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), bits.to(torch.int16)


def join_planes(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`split_planes`: fp32."""
    carry = (low < 0).to(torch.int32)  # the low half was >= 0x8000: the high plane was rounded up
    bits = ((high.contiguous().view(torch.int16).to(torch.int32) - carry) << 16) | (low.to(torch.int32) & 0xFFFF)
    return bits.view(torch.float32)


@dataclass(frozen=True)
class StatePool:
    """One layer's slots. Views into a page are fine: the first dimension may have any stride, the others are contiguous.

    Attributes:
        high: [slots, HV, V, K] bf16, high plane of S.
        low: [slots, HV, V, K] int16, low plane of S.
        k: [slots, H, C, K] bf16, normalised keys of the open chunk.
        rhs: [slots, HV, C, V] bf16, beta_t (v_t - e^{G_t} S k_t) of the open chunk, as the solve consumes it.
        gates: [slots, HV, 2, C] fp32, cumulative log decay G and beta of the open chunk.
    """

    high: torch.Tensor
    low: torch.Tensor
    k: torch.Tensor
    rhs: torch.Tensor
    gates: torch.Tensor

    @staticmethod
    def spec(H: int, HV: int, K: int, V: int, chunk: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Field -> (shape of one slot, dtype)."""
        return {
            "high": ((HV, V, K), torch.bfloat16),
            "low": ((HV, V, K), torch.int16),
            "k": ((H, chunk, K), torch.bfloat16),
            "rhs": ((HV, chunk, V), torch.bfloat16),
            "gates": ((HV, 2, chunk), torch.float32),
        }

    @classmethod
    def empty(cls, slots: int, H: int, HV: int, K: int, V: int, chunk: int, device="cpu") -> StatePool:
        """Uninitialised pool: a slot's contents matter only once its sequence has written them."""
        fields = cls.spec(H, HV, K, V, chunk)
        return cls(**{f: torch.empty(slots, *s, dtype=d, device=device) for f, (s, d) in fields.items()})

    @property
    def chunk(self) -> int:
        return self.k.shape[2]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.high, self.low, self.k, self.rhs, self.gates

    def live(self, slot: int, position: int) -> tuple[torch.Tensor, ...]:
        """What a slot means after ``position`` tokens: S (fp32) and the open rows of k, rhs and gates."""
        t = position % self.chunk
        S = join_planes(self.high[slot], self.low[slot])
        S = S if position >= self.chunk else torch.zeros_like(S)
        return S, self.k[slot, :, :t], self.rhs[slot, :, :t], self.gates[slot, :, :, :t]


@dataclass(frozen=True)
class RecurrentPool(StatePool):
    """Slots of the form `cpr`: those of `cpr_wy`, and the running state of the open chunk.

    Attributes:
        now: [slots, HV, V, K] fp32, the state after the last token; meaningful only inside a chunk.
    """

    now: torch.Tensor

    @staticmethod
    def spec(H: int, HV: int, K: int, V: int, chunk: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Field -> (shape of one slot, dtype)."""
        return StatePool.spec(H, HV, K, V, chunk) | {"now": ((HV, V, K), torch.float32)}

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return *super().tensors(), self.now

    def live(self, slot: int, position: int) -> tuple[torch.Tensor, ...]:
        """As :meth:`StatePool.live`, then the running state, zeros where no chunk is open."""
        now = self.now[slot] if position % self.chunk else torch.zeros_like(self.now[slot])
        return *super().live(slot, position), now


class Plan:
    """Chunk tables of a packed batch, built once on the host and shared by every layer.

    Args:
        lengths: new tokens of each sequence (0 allowed).
        chunk: C.
        starts: tokens each sequence has already seen (default 0): chunks are aligned to absolute position 0.
        device: where the int32 tables live.
    """

    def __init__(self, lengths: list[int], chunk: int, starts: list[int] | None = None, device="cpu"):
        starts = [0] * len(lengths) if starts is None else list(starts)
        if chunk not in CHUNK_SIZES:
            raise ContractError(f"gdn: chunk size {chunk} is not one of {CHUNK_SIZES}")
        if len(starts) != len(lengths) or min([0, *lengths, *starts]) < 0:
            raise ContractError(f"gdn: lengths {lengths} and starts {starts} do not describe a packed batch")
        self.chunk, self.lengths, self.starts = chunk, list(lengths), starts
        self.offsets, self.first_chunk, owner, local = [0], [], [], []
        for n, (length, start) in enumerate(zip(lengths, starts)):
            self.offsets.append(self.offsets[-1] + length)
            self.first_chunk.append(len(owner))
            count = -(-(start % chunk + length) // chunk) if length else 0
            owner += [n] * count
            local += range(count)
        self.tokens, self.chunks = self.offsets[-1], len(owner)
        self.whole_chunks = max((length // chunk for length in lengths), default=0)  # of the longest sequence
        table = torch.tensor([self.offsets[:-1], lengths, starts, self.first_chunk], dtype=torch.int32)
        self.sequence_table = table.T.contiguous().to(device)  # [N, 4]: first row, length, start, first chunk
        self.chunk_table = torch.tensor([owner, local], dtype=torch.int32).T.contiguous().to(device)  # [chunks, 2]

    @functools.cached_property
    def token_table(self) -> torch.Tensor:
        """[T, 2] int32: sequence and position within this call of each row."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        owner = torch.arange(len(self.lengths)).repeat_interleave(lengths)
        offsets = torch.tensor(self.offsets[:-1], dtype=torch.int64).repeat_interleave(lengths)
        return torch.stack([owner, torch.arange(self.tokens) - offsets], 1).int().to(self.sequence_table.device)

    @functools.cached_property
    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of the backward, whose blocks are BLOCK tokens: first block of each sequence [N]; [blocks, 3] = first row,
        rows, whether it is its sequence's last."""
        first, table = [], []
        for offset, length in zip(self.offsets, self.lengths):
            first.append(len(table))
            for start in range(0, length, BLOCK):
                table.append((offset + start, min(BLOCK, length - start), int(start + BLOCK >= length)))
        device = self.sequence_table.device
        rows = torch.tensor(table, dtype=torch.int32).reshape(-1, 3)
        return torch.tensor(first, dtype=torch.int32).to(device), rows.to(device)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens, chunk: int, starts=None, device="cpu") -> Plan:
        """From cumulative lengths (list or host tensor); repeated entries are sequences of length 0."""
        cu = [int(c) for c in cu_seqlens]
        return cls([b - a for a, b in zip(cu, cu[1:])], chunk, starts, device)
