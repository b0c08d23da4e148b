"""What recording costs: one decode step and one packed scoring pass of the ops alone, without a recorder and at each level.

    python -m bench.recorder [--device cuda|cpu] [--only WORD] [--commit HASH] [--out FILE]

On a GPU the decode step is in a CUDA graph: it is replayed, and after each replay the host reads what the graph wrote and waits for the
step, as an engine does for its tokens. On a CPU both run eagerly, and the process's own CPU time counts, which other work on the machine
does not touch. The same without a recorder is measured twice: the ratio of the second says how far two equal runs differ.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from bench import table
from bench.passes import QWEN3_8B, DecodeStep, PackedPass, Sizes
from isoexec.ops._core import registry
from isoexec.ops._trace.recorder import Recorder

LEVELS = ("none", "none again", "layers", "ops")
#: Rounds in which each level takes its turn. Equal scoring passes differed by 6 % in five turns of three each: single ones, in many turns.
ROUNDS, TURNS = 5, 25
#: Steps of a round.
REPLAYS = 20
SCORED = QWEN3_8B._replace(layers=12, batch=4, context=1024)
#: On a CPU: a decode step of 16 sequences, and a packed pass of 2.
SMALL = Sizes(layers=4, hidden=1024, heads=16, key_heads=4, head_size=64, width=3072, vocabulary=512, batch=16, context=160)
SMALL_SCORED = SMALL._replace(batch=2)


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


def eager(packed, level: str):
    """A function that runs the pass once, recorded at ``level``; one recorder for all of its runs, as for a training run."""
    if level.startswith("none"):
        return packed.run
    recorder, rows = Recorder(level), packed.rows()

    def run():
        with registry.observing(recorder):
            packed.run(lambda: recorder.begin(*rows))

    return run


def medians(runs: dict, count: int, rounds: int = ROUNDS, clock=time.perf_counter, wait=torch.cuda.synchronize) -> dict[str, float]:
    """Median microseconds of a run, over rounds in which each takes its turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            wait()
            began = clock()
            for _ in range(count):
                run()
                wait()
            if round_:  # the first one warms up
                found[name].append((clock() - began) / count * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def add(results: table.Table, stage: str, shape: str, times: dict[str, float], clock: str, note: str) -> None:
    for level in [level for level in times if level != "none"]:
        target = 1.05 if level == "layers" else None
        native = "the same without a recorder"
        results.add(f"trace, {level}", stage, shape, times[level], times["none"], native, target=target, clock=clock, note=note)


def decode_on_a_gpu(results: table.Table) -> None:
    s, step = QWEN3_8B, DecodeStep(QWEN3_8B, "cuda")
    step.run()  # compiles
    torch.cuda.synchronize()
    times = medians({level: captured(step, level) for level in LEVELS}, REPLAYS)
    note = "replays one by one, reading of the digests included"
    add(results, "decode step", f"Qwen3 8B, {s.batch} at {s.context}", times, "graph", note)


def scoring_on_a_gpu(results: table.Table) -> None:
    s, packed = SCORED, PackedPass(SCORED, "cuda")
    note = "eager, the host's work included"
    # Apart: the last level's many launches leave the GPU idle, and the next pass was faster for it.
    for levels in (LEVELS[:-1], (LEVELS[0], LEVELS[-1])):
        times = medians({level: eager(packed, level) for level in levels}, 1, TURNS)
        add(results, "scoring", f"Qwen3 8B, {s.layers} layers, {s.batch} x {s.context}", times, "host", note)


def on_a_cpu() -> None:
    """Prints microseconds of CPU time and ratios."""
    torch.set_num_threads(1)
    for name, made in (("decode step", DecodeStep(SMALL, "cpu")), ("scoring", PackedPass(SMALL_SCORED, "cpu"))):
        runs = {level: eager(made, level) for level in LEVELS}
        times = medians(runs, 3 if name == "decode step" else 1, clock=time.process_time, wait=lambda: None)
        for level in LEVELS:
            print(f"{name:12} {level:11} {times[level]:10.0f} us  {times[level] / times['none']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", default="", help="of the measured tree, where git is not at hand")
    parser.add_argument("--only", default="", metavar="WORD", help="of a GPU's parts: decode or scoring")
    parser.add_argument("--out", default=table.PATH, help="table to write (default: %(default)s)")
    options = parser.parse_args()
    if options.device == "cpu":
        on_a_cpu()
        return
    table.need_gpu()
    results = table.Table(options.out, options.commit)
    for part in (decode_on_a_gpu, scoring_on_a_gpu):
        if options.only in part.__name__:
            part(results)


if __name__ == "__main__":
    main()
