"""What recording costs on a GPU: a decode step in a CUDA graph, and a packed scoring pass, without a recorder and at each level.

    python -m bench.captured [--commit HASH] [--out FILE]

The decode step is replayed, and after each replay the host reads what the graph wrote and waits for the step, as an engine does for its tokens.
The same step without a recorder is measured twice: the ratio of the second says how far two equal runs differ here.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from bench import table
from bench.passes import QWEN3_8B, DecodeStep, PackedPass
from isoexec.ops._core import registry
from isoexec.ops._trace.recorder import Recorder

LEVELS = ("none", "none again", "layers", "ops")
ROUNDS, REPLAYS, PASSES = 7, 20, 3
SCORED = QWEN3_8B._replace(layers=12, batch=4, context=1024)


def captured(step: DecodeStep, level: str):
    """A function that runs the step once, by a graph that records at ``level``."""
    graph = torch.cuda.CUDAGraph()
    if level.startswith("none"):
        with torch.cuda.graph(graph):
            step.run()
        return graph.replay
    recorder, rows = Recorder(level), step.rows()
    with torch.cuda.graph(graph), registry.observing(recorder), recorder.capturing() as found:
        step.run(lambda: recorder.begin(*rows))

    def run():
        graph.replay()
        recorder.replayed(found, rows)

    return run


def eager(packed: PackedPass, level: str):
    """A function that runs the pass once, recorded at ``level``; one recorder for all of its runs, as for a training run."""
    if level.startswith("none"):
        return packed.run
    recorder, rows = Recorder(level), packed.rows()

    def run():
        with registry.observing(recorder):
            packed.run(lambda: recorder.begin(*rows))

    return run


def medians(runs: dict, count: int) -> dict[str, float]:
    """Median microseconds of a run, over rounds in which each takes its turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + 1):
        for name, run in runs.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                run()
                torch.cuda.synchronize()
            if round_:  # the first one warms up
                found[name].append((time.perf_counter() - began) / count * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def add(results: table.Table, op: str, stage: str, shape: str, times: dict[str, float], clock: str, note: str) -> None:
    for level in LEVELS[1:]:
        target = 1.05 if level == "layers" else None
        results.add(f"{op}, {level}", stage, shape, times[level], times["none"], "the same without a recorder", target=target, clock=clock, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commit", default="", help="of the measured tree, where git is not at hand")
    parser.add_argument("--out", default=table.PATH, help="table to write (default: %(default)s)")
    options = parser.parse_args()
    table.need_gpu()
    results = table.Table(options.out, options.commit)
    step, s = DecodeStep(QWEN3_8B, "cuda"), QWEN3_8B
    step.run()  # compiles
    torch.cuda.synchronize()
    times = medians({level: captured(step, level) for level in LEVELS}, REPLAYS)
    add(results, "trace", "decode step", f"Qwen3 8B, {s.batch} at {s.context}", times, "graph", "replays one by one, reading of the digests included")
    del step
    packed, s = PackedPass(SCORED, "cuda"), SCORED
    packed.run()
    times = medians({level: eager(packed, level) for level in LEVELS}, PASSES)
    add(results, "trace", "scoring", f"Qwen3 8B, {s.layers} layers, {s.batch} x {s.context}", times, "host", "eager, the host's work included")


if __name__ == "__main__":
    main()
