"""Decode steps in vLLM's CUDA graphs, under a contract.

A graph launches what the ops launched when it was captured; their Python ran then and runs no more. So a replay counts the ops of its pass
again, says which case the step is, and hands what the captured kernels recorded to the observer that they were captured for.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from isoexec.contract import ContractError
from isoexec.ops._core import registry
from isoexec.runtimes.vllm import step

_LARGEST = 512  # rows of a graph
_replays: Counter[int] = Counter()


class Pass(NamedTuple):
    """What is known of a captured forward pass: rows, calls of ops, and for whom it records what, if for anybody."""

    rows: int
    calls: Counter
    observer: object | None
    recorded: object | None


class _Nobody:
    """Rows of a pass that is being captured."""

    def __init__(self, rows: int):
        self._rows = rows

    def tokens(self):
        return torch.full((self._rows,), -1), torch.zeros(self._rows, dtype=torch.int64)


def arguments(max_num_seqs: int) -> dict:
    """Arguments of ``vllm.LLM`` for captured decode steps of up to ``max_num_seqs`` sequences, without compilation."""
    largest = min(max_num_seqs, _LARGEST)
    sizes = [1 << n for n in range(_LARGEST.bit_length()) if 1 << n < largest] + [largest]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    graphs["cudagraph_num_of_warmups"] = 1  # kernels are compiled and loaded at first use, which a capture does not allow
    return {"enforce_eager": False, "compilation_config": graphs}


def capture(forward: Callable[[], torch.Tensor], rows: int) -> tuple[torch.Tensor, Pass]:
    """Run ``forward``, a pass over ``rows`` tokens, inside ``torch.cuda.graph``; (its output, what replays need to know)."""
    before, observer = Counter(registry.served()), registry.current_observer()
    if observer is None:
        output, recorded = forward(), None
    else:
        with observer.capturing() as recorded, step.observed(_Nobody(rows)):
            output = forward()
    return output, Pass(rows, Counter(registry.served()) - before, observer, recorded)


def replayed(done: Pass) -> None:
    """The graph of ``done`` was launched for the batch that the model runner holds.

    Raises:
        ContractError: the graph records for another observer than this thread's, or for none.
    """
    _replays[done.rows] += 1
    registry.count(done.calls)
    rows = step.begin_replay()
    if rows is None:
        return
    observer = registry.current_observer()
    if observer is not done.observer:
        raise ContractError("trace: expected a graph that was captured for this recording, found another; capture the graphs again")
    observer.replayed(done.recorded, rows, goes_on=True)


def replays() -> dict[int, int]:
    """Replays of this process so far, by rows of the graph."""
    return dict(_replays)


def recapture(runner) -> None:
    """Capture the graphs of a vLLM model runner again, for the observer of this thread, or for none. No sequence may be running."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.platforms import current_platform

    CUDAGraphWrapper.clear_all_graphs()
    # A pool whose graphs are gone takes no others while a recording still holds what they wrote.
    pool = current_platform.graph_pool_handle()
    for wrapper in CUDAGraphWrapper._all_instances:
        wrapper.graph_pool = pool
    runner.capture_model()


@contextlib.contextmanager
def eager(runner):
    """Steps inside the block run without graphs, which stay as they are: for an observer that reads on the host what no replay shows it."""
    dispatcher = runner.cudagraph_dispatcher
    initialized, dispatcher.keys_initialized = dispatcher.keys_initialized, False
    try:
        yield
    finally:
        dispatcher.keys_initialized = initialized
