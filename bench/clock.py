"""Clocks of a comparison: both sides of a row are timed by the same one."""

from __future__ import annotations

import torch
import triton


def graph_us(launches, replays: int = 12) -> float:
    """Median time of one launch set among ``launches``, all in one CUDA graph: the device's time, without gaps that the host leaves."""
    for fn in launches:
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for fn in launches:
            fn()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return sorted(times)[len(times) // 2]


def events_us(launches) -> float:
    """Median time of eager calls between two events."""
    fn = launches[0]
    fn()
    torch.cuda.synchronize()
    return triton.testing.do_bench(fn, warmup=10, rep=60, return_mode="median") * 1e3


def compared(ours, natives: dict, failures: list[str]) -> tuple[float, dict[str, float], str]:
    """-> our time, time of each native that runs, clock: replayed graphs, or events for all where one of them cannot be captured.

    Args:
        ours: launch set (list of callables).
        natives: name -> launch set, run once before it is timed, when it tunes itself.
        failures: gets a line for every native that does not run, or cannot be captured.
    """
    running = {}
    for name, launches in natives.items():
        try:
            launches[0]()
            torch.cuda.synchronize()
            running[name] = launches
        except Exception as error:  # a native kernel's refusal is a result
            failures.append(f"{name}: {_line(error)}")
    try:
        return graph_us(ours), {name: graph_us(launches) for name, launches in running.items()}, "graph"
    except Exception as error:
        failures.append(f"no graph clock: {_line(error)}")
        torch.cuda.synchronize()
        return events_us(ours), {name: events_us(launches) for name, launches in running.items()}, "events"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
