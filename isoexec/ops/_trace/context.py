"""What ops that look back see: the positions they take their rows for, and digests of the past that they read.

Every function takes the op's arguments by name. ``rows`` is the recorder's own account of the batch (:class:`Rows`), which an op's
arguments are held against.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from isoexec.ops._trace.digest import placed, row_digests


class Rows(NamedTuple):
    """Token rows of a pass, as the runtime knows them.

    Attributes:
        sequence, position: [T] int64 on the CPU; sequence -1 is padding.
        keep: rows to record, or None for all.
    """

    sequence: torch.Tensor
    position: torch.Tensor
    keep: torch.Tensor | None


def reading(*names: str):
    """Names the arguments that a function of positions reads besides the number of tokens."""

    def decorate(function):
        function.reads = names
        return function

    return decorate


@reading("cu_seqlens")
def of_bounds(a: dict, rows: Rows) -> torch.Tensor:
    """Positions within ``cu_seqlens``."""
    return _within(a["cu_seqlens"], a["q"].shape[0])


@reading("seq_lens", "query_start_loc")
def of_pages(a: dict, rows: Rows) -> torch.Tensor:
    """Positions that ``seq_lens`` and ``query_start_loc`` give to the new tokens."""
    starts, tokens = a["query_start_loc"].to(torch.int64), a["q"].shape[0]
    past = a["seq_lens"].to(torch.int64) - starts.diff()
    owner = _owner(starts, tokens).clamp(max=len(past) - 1)  # rows that pad a captured step come after the last sequence
    return _within(starts, tokens) + past[owner]


@reading("plan")
def of_plan(a: dict, rows: Rows) -> torch.Tensor:
    """Positions of a chunk plan."""
    plan = a["plan"]
    owner, local = plan.token_table.to(torch.int64).unbind(1)
    return local + torch.tensor(plan.starts, dtype=torch.int64, device=owner.device)[owner]


@reading("positions")
def of_steps(a: dict, rows: Rows) -> torch.Tensor:
    """Positions that are an argument."""
    return a["positions"].to(torch.int64)


def of_packed(a: dict, rows: Rows) -> torch.Tensor:
    """Digest of the keys and values up to each row, of sequences that lie whole in the batch."""
    position = rows.position[: a["k"].shape[0]].to(a["k"].device)
    each = _keys_and_values(a["k"], a["v"], position)
    total = each.cumsum(0)
    first = torch.arange(len(position), device=position.device) - position
    return total - (total - each)[first]


def of_cache(a: dict, rows: Rows) -> torch.Tensor:
    """Digest of the cached keys and values up to each new row: equal to :func:`of_packed` if the cache holds what was written."""
    size = a["key_cache"].shape[1]
    found = []
    for table, start, end, length in zip(
        a["block_table"], a["query_start_loc"][:-1].tolist(), a["query_start_loc"][1:].tolist(), a["seq_lens"].tolist()
    ):
        pages = table[: -(-length // size)].long()
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (a["key_cache"], a["value_cache"]))
        total = _keys_and_values(k, v, torch.arange(length, device=k.device)).cumsum(0)
        found.append(total[length - (end - start) :])
    return torch.cat(found)


def of_window(a: dict, rows: Rows) -> torch.Tensor:
    """Digest of the inputs that a convolution's taps reach back to, from the batch itself or from the window of an earlier step."""
    x, reach = a["x"], a["weight"].shape[1] - 1
    own, position = row_digests(x), rows.position[: len(x)].tolist()
    window = a.get("window")
    if "slots" in a:  # single tokens, whose windows lie in a pool
        before, plan_starts = row_digests(window[a["slots"].long()].flatten(0, 1)).view(-1, reach), range(len(x))
    else:
        before = None if window is None else row_digests(window.flatten(0, 1)).view(-1, reach)
        plan_starts = a["plan"].offsets[:-1]
    total = torch.zeros_like(own)
    bounds = [*plan_starts, len(x)]
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        if start == end:
            continue
        head = own.new_zeros(reach) if before is None else before[n]
        line = torch.cat([head, own[start:end]])
        places = torch.arange(-reach, end - start, device=own.device) + position[start]
        line = torch.where(places >= 0, placed(line, places), 0)
        for back in range(1, reach + 1):
            total[start:end] += line[reach - back : reach - back + end - start]
    return total


def planned_pieces(a: dict) -> list[tuple[int, int, int, int]]:
    """(row, slot, position before, position after) of each piece of a plan."""
    plan = a["plan"]
    pieces = zip(plan.offsets, a["slots"].tolist(), plan.starts, plan.lengths)
    return [(row, slot, start, start + length) for row, slot, start, length in pieces if length]


def single_pieces(a: dict) -> list[tuple[int, int, int, int]]:
    """The same of single tokens; lanes without a sequence are left out."""
    lanes = zip(range(len(a["slots"])), a["slots"].tolist(), a["positions"].tolist())
    return [(row, slot, position, position + 1) for row, slot, position in lanes if slot >= 0 and slot != a.get("null_slot", -1)]


def state_digest(pool, slot: int, position: int) -> int:
    """Digest of what a slot means after ``position`` tokens, as an unsigned 64-bit integer."""
    parts = [row_digests(part.reshape(1, -1))[0] for part in pool.live(slot, position)]
    return int(row_digests(torch.stack(parts).unsqueeze(0))[0]) % (1 << 64)


def _keys_and_values(k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return placed(row_digests(k), 2 * position) + placed(row_digests(v), 2 * position + 1)


def _owner(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    every = torch.arange(tokens, device=starts.device)
    return torch.bucketize(every, starts, right=True) - 1  # the last start <= row: skips empty sequences


def _within(bounds: torch.Tensor, tokens: int) -> torch.Tensor:
    starts = bounds.to(torch.int64)
    return torch.arange(tokens, device=starts.device) - starts[_owner(starts, tokens)]
