"""Micro-batches: sequences packed one after another, or, for kernels that know no packing, padded beside each other."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from isoexec.contract import ContractError

Pair = tuple[Sequence[int], Sequence[int]]


class MicroBatch(NamedTuple):
    """Tokens of some sequences and where the logits of their generated tokens lie.

    Attributes:
        indices: which sequences, in the order of the batch.
        counts: generated tokens of each.
        input_ids, position_ids: [1, T] packed, or [B, S] padded; int64.
        packed: boundaries for Megatron, or None when padded.
        rows: [N] int64, index of each generated token's logits row in the flattened [batch, token] grid.
        targets: [N] int64, the generated tokens.
    """

    indices: list[int]
    counts: list[int]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    packed: PackedSeqParams | None
    rows: torch.Tensor
    targets: torch.Tensor


class Bounds(NamedTuple):
    """Where the sequences of a micro-batch begin and end.

    Attributes:
        cu_seqlens: [B + 1] int32, on the micro-batch's device.
        on_host: the same numbers.
    """

    cu_seqlens: torch.Tensor
    on_host: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((stop - start for start, stop in itertools.pairwise(self.on_host)), default=0)


#: (tensor, its version, what it held) of the latest micro-batches, latest first: a pipeline has several under way.
_read: deque[tuple[torch.Tensor, int, Bounds]] = deque(maxlen=8)


def bounds_of(packed_seq_params: PackedSeqParams | None, tokens: int, device: torch.device, anew: bool = False) -> Bounds:
    """Bounds of a micro-batch of ``tokens`` tokens; one sequence when it is not packed.

    A device is waited for once per micro-batch, not in every layer: what has been read of a tensor serves until the tensor is written.

    Args:
        anew: read it in any case. A collective, a graph or ``.data`` writes a tensor without a trace: whoever is asked first in a
            micro-batch says so, lest the layers be given the one before.

    Raises:
        ContractError: the pack has another format, or does not cover the tokens.
    """
    if packed_seq_params is None:
        return Bounds(torch.tensor([0, tokens], dtype=torch.int32, device=device), (0, tokens))
    if packed_seq_params.qkv_format != "thd":
        raise ContractError(f"packed_seq_params.qkv_format: expected 'thd', found {packed_seq_params.qkv_format!r}")
    padded = packed_seq_params.cu_seqlens_q_padded
    found = _bounds(packed_seq_params.cu_seqlens_q if padded is None else padded, anew)
    if found.on_host[-1:] != (tokens,):
        raise ContractError(
            f"packed_seq_params.cu_seqlens_q: expected to end at the {tokens} tokens of the micro-batch, found {list(found.on_host)}; "
            "make padding a sequence of its own"
        )
    return found


def _bounds(cu_seqlens: torch.Tensor, anew: bool) -> Bounds:
    for tensor, version, bounds in () if anew else tuple(_read):
        if tensor is cu_seqlens and version == cu_seqlens._version:
            return bounds
    bounds = Bounds(cu_seqlens.to(torch.int32), tuple(cu_seqlens.tolist()))
    if not cu_seqlens.is_inference():  # those keep no version
        _read.appendleft((cu_seqlens, cu_seqlens._version, bounds))
    return bounds


def groups_of(sequences: Sequence[Pair], packing: Sequence[Sequence[int]] | int) -> list[list[int]]:
    """Which sequences share a micro-batch.

    Args:
        sequences: (prompt tokens, generated tokens).
        packing: the groups themselves (indices into ``sequences``), or a number of tokens that a group may hold; then sequences
            are taken in order, and one that is longer stands alone.

    Raises:
        ContractError: the groups leave a sequence out, hold one twice or are empty; or a prompt is empty.
    """
    for index, (prompt, _) in enumerate(sequences):
        if not len(prompt):
            raise ContractError(f"sequence {index}: expected a prompt of at least one token, found none: its first token has no logits")
    if not isinstance(packing, int):
        groups = [list(group) for group in packing]
        if sorted(i for group in groups for i in group) != list(range(len(sequences))) or not all(groups):
            raise ContractError(f"packing: expected groups that hold each of {len(sequences)} sequences once, found {groups}")
        return groups
    groups, room = [], 0
    for index, (prompt, generated) in enumerate(sequences):
        length = len(prompt) + len(generated)
        if not groups or length > room:
            groups.append([])
            room = packing
        groups[-1].append(index)
        room -= length
    return groups


def pack(sequences: Sequence[Pair], group: list[int], device, multiple_of: int = 1) -> MicroBatch:
    """One packed micro-batch; padding up to ``multiple_of`` tokens is a sequence of its own, so that it reaches no other."""
    tokens = [[*sequences[i][0], *sequences[i][1]] for i in group]
    padding = -sum(map(len, tokens)) % multiple_of
    runs = tokens + ([[0] * padding] if padding else [])
    bounds = torch.tensor([0, *(len(run) for run in runs)]).cumsum(0).to(torch.int32)
    longest = max(map(len, runs))
    starts = bounds[: len(group)].tolist()
    return MicroBatch(
        group,
        [len(sequences[i][1]) for i in group],
        _ids([sum(runs, [])], device),
        _ids([[p for run in runs for p in range(len(run))]], device),
        PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds.to(device),
            cu_seqlens_kv=bounds.to(device),
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        *_targets(sequences, group, starts, device),
    )


def pad(sequences: Sequence[Pair], group: list[int], device) -> MicroBatch:
    """One right-padded micro-batch; a causal mask keeps the padding from what comes before it."""
    tokens = [[*sequences[i][0], *sequences[i][1]] for i in group]
    longest = max(map(len, tokens))
    return MicroBatch(
        group,
        [len(sequences[i][1]) for i in group],
        _ids([run + [0] * (longest - len(run)) for run in tokens], device),
        _ids([list(range(longest))] * len(group), device),
        None,
        *_targets(sequences, group, [b * longest for b in range(len(group))], device),
    )


def rows_of(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequence, position) [T] int64 of each row, on the CPU; sequence -1 for padding."""
    if batch.packed is None:
        sequences, length = batch.position_ids.shape
        return torch.tensor(batch.indices).repeat_interleave(length), batch.position_ids.cpu().reshape(-1)
    lengths = batch.packed.cu_seqlens_q.cpu().diff().to(torch.int64)
    owners = torch.tensor([*batch.indices, *[-1] * (len(lengths) - len(batch.indices))])
    return owners.repeat_interleave(lengths), batch.position_ids[0].cpu()


def _targets(sequences, group, starts, device) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [start + len(sequences[i][0]) - 1 + n for i, start in zip(group, starts, strict=True) for n in range(len(sequences[i][1]))]
    return _ids(rows, device), _ids([token for i in group for token in sequences[i][1]], device)


def _ids(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
