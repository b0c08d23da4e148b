"""Gated DeltaNet against the native kernels: medians on one GPU, both in one run.

    python -m bench.gdn [--native DIR] [--sweep best.json] [--csv bench/results.csv] [--commit HASH] [--rows WORDS ...] [--skip WORDS ...]

DIR holds fla-core, tilelang (fla's backward needs it on Hopper), vLLM's Triton files and FlashInfer's library (build_flashinfer.py), with
their metadata, if the environment has none. A row's sides share one clock: replayed CUDA graphs, or events where a native side cannot be
captured. Decode walks through pools larger than the L2 cache, as the layers of a model do; sequence shapes exceed it by themselves. A
native kernel that does not run is named in the row's note. Natives that tune themselves do so anew for every row.
Without --sweep the committed launch table is measured; --sweep times the candidates first and reports the best ones, to be committed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch

from bench import gdn_native as native
from bench.clock import compared, graph_us
from bench.gdn_cases import SEQUENCES, Decode, Sequence
from bench.table import PATH, Table, need_gpu
from isoexec.ops.gdn import launch

C = 16
BATCHES = (1, 8, 64, 256)
FORWARD, BOTH, PREFILL, DECODE, ALONE = "trainer forward", "trainer forward + backward", "prefill", "decode", "decode, core alone"
CORE, CPR = f"cpr_wy C={C}", "cpr C=64"
MODELS, FUSED = f"mixer C={C}, as the models run it", f"mixer C={C}, fused ops"
TARGETS = {(CORE, BOTH): 1.02, (CORE, PREFILL): 0.80, (MODELS, PREFILL): 0.90, (MODELS, BOTH): 0.90, (MODELS, DECODE, "256"): 0.90,
           (CORE, DECODE, "1"): 1.5, (CORE, DECODE, "8"): 1.5, (CORE, DECODE, "64"): 0.70, (CORE, DECODE, "256"): 0.70}  # fmt: skip


def _entries(**lists):
    """Settings from columns: _entries(BV=(16, 32), num_warps=(1, 2)) -> two entries."""
    return [dict(zip(lists, row)) for row in zip(*lists.values())]


#: (kernel, shape) -> entries; each is timed inside its whole stage.
CANDIDATES = {
    ("chain_narrow", "1x10240"): _entries(BV=(16, 16, 16), num_warps=(1,) * 3, stages=(3, 2, 2), unroll=(4, 4, 2)),
    ("chain", "8x1280"): _entries(BV=(64, 64, 16), num_warps=(4, 4, 1), stages=(2,) * 3, unroll=(2, 1, 4)),
    ("back_chain_narrow", "1x10240"): _entries(BV=(16, 16), num_warps=(1, 1), stages=(3, 2)),
    ("back_chain", "8x1280"): _entries(BV=(64, 16, 32), num_warps=(4, 1, 2), stages=(2,) * 3),
    ("back_inner", "8x1280"): _entries(BV=(64, 64, 32, 32), num_warps=(4,) * 4, stages=(3, 1, 2, 3)),
    ("back_query", "8x1280"): _entries(BK=(64, 64, 128), BV=(64, 32, 64), num_warps=(4, 4, 8), stages=(2,) * 3),
    ("back_key", "8x1280"): _entries(BV=(64, 64, 32), num_warps=(4, 4, 4), stages=(2, 1, 2)),
}  # fmt: skip


def sweep(shapes):
    """Time every candidate inside its whole stage, keep the best in the table of this process."""
    best = {}
    for (kernel, shape), entries in CANDIDATES.items():
        case, times = shapes(shape), []
        for entry in entries:
            launch.TABLE[kernel] = {**launch.TABLE[kernel], str(C): entry}
            try:
                times.append((graph_us(case.forward() if kernel.startswith("chain") else case.backward()), entry))
                print(f"sweep {kernel} {shape} {entry} {times[-1][0]:.1f}", flush=True)
            except Exception as error:
                print(f"sweep {kernel} {entry}: {str(error)[:200]}", flush=True)
        time_us, entry = min(times, key=lambda t: t[0])
        launch.TABLE[kernel] = {**launch.TABLE[kernel], str(C): entry}
        best[f"{kernel} {shape}"] = {"us": time_us, "entry": entry}
    return best


def sequence_rows(name, case):
    """-> (op, stage, launch set of ours, {native: launch set}) of a packed shape."""
    theirs = native.Sequence(case)
    if name in ("1x10240", "8x1280"):
        yield CORE, FORWARD, case.forward(), theirs.forwards()
        yield CORE, BOTH, case.train(), theirs.trainings()
        yield MODELS, BOTH, case.both(case.mixer_train, case.values()), theirs.mixer_trainings()
        yield FUSED, BOTH, case.both(case.fused_train, case.values()), theirs.mixer_trainings()
    else:
        yield CORE, PREFILL, case.prefill(), theirs.prefills()
    if name != "8x1280":
        yield MODELS, PREFILL, case.mixer_prefill(), theirs.mixer_prefills()
        yield FUSED, PREFILL, case.fused_prefill(), theirs.mixer_prefills()


def published_rows(name, case):
    """The published form, at its chunk size."""
    if isinstance(case, Decode):
        yield CPR, ALONE, case.core(64, "cpr"), native.Decode(case).cores()
        return
    theirs = native.Sequence(case)
    if name in ("1x10240", "8x1280"):
        yield CPR, BOTH, case.train("cpr"), theirs.trainings()
    else:
        yield CPR, PREFILL, case.prefill("cpr"), theirs.prefills()


def decode_rows(case):
    theirs = native.Decode(case)
    yield CORE, DECODE, case.step(), theirs.steps()
    yield MODELS, DECODE, case.mixer(), theirs.mixers()
    yield FUSED, DECODE, case.fused_mixer(), theirs.mixers()
    for op, chunk in ((CORE, C), ("cpr_wy C=32", 32)):
        yield op, ALONE, case.core(chunk), theirs.cores()


def measure(table, shape, rows, only=(), skip=()):
    """Time each row and add it to ``table``; one that fails is printed, the others count.

    Args:
        only: words of ``"op, stage"``; a row without any of them is left out. All rows where there are none.
        skip: words of the names of natives that are not timed, which the row's note says.
    """
    for op, stage, ours, natives in rows:
        if only and not any(words in f"{op}, {stage}" for words in only):
            continue
        skipped = [name for name in natives if any(words in name for words in skip)]
        natives = {name: launches for name, launches in natives.items() if name not in skipped}
        native.forget()
        failed: list[str] = []
        try:
            ours_us, found, clock = compared(ours, natives, failed)
        except Exception as error:
            print(f"{op} {stage} {shape}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        name, best = min(found.items(), key=lambda item: item[1]) if found else ("", None)
        others = [f"{other} {us:.1f} us" for other, us in found.items() if other != name]
        target = TARGETS.get((op, stage), TARGETS.get((op, stage, shape)))
        untimed = [f"not timed in this run: {name}" for name in skipped]
        note = "; ".join([f"launch table {launch.digest()[:16]}", native.TUNED, *others, *failed, *untimed])
        table.add(op, stage, shape, ours_us, best, name, target=target, clock=clock, note=note)
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", default="")
    parser.add_argument("--csv", default=PATH)
    parser.add_argument("--sweep")
    parser.add_argument("--commit", default="")
    parser.add_argument("--only", nargs="+", default=[], help="shapes, e.g. 1x8192 or 256")
    parser.add_argument("--rows", nargs="+", default=[], metavar="WORDS", help="only rows whose op, stage has them, e.g. 'C=16, decode'")
    parser.add_argument("--skip", nargs="+", default=[], metavar="WORDS", help="natives not to time, by words of their names")
    parser.add_argument("--warm", type=int, nargs=2, metavar=("SHARE", "OF"), help="compile a share of the kernels, measure nothing")
    options = parser.parse_args()
    if options.native:
        sys.path.insert(0, options.native)
    torch.set_grad_enabled(False)
    cache: dict = {}

    def shapes(name, chunk=C):
        if (name, chunk) not in cache:
            cache.clear()
            torch.cuda.empty_cache()
            cache[name, chunk] = Sequence([min(n, 1024) for n in SEQUENCES[name]] if options.warm else SEQUENCES[name], chunk)
        return cache[name, chunk]

    if options.warm:
        return warm(shapes, options.sweep, *options.warm)
    if options.sweep:
        with open(options.sweep, "w") as file:
            json.dump(sweep(shapes), file, indent=1)
    native.tune()
    table = Table(options.csv, options.commit, native.PACKAGES)
    wanted = lambda shape: not options.only or shape in options.only
    add = lambda shape, rows: measure(table, shape, rows, options.rows, options.skip)
    for name in filter(wanted, SEQUENCES):
        add(name, sequence_rows(name, shapes(name)))
    for B in BATCHES:
        if wanted(str(B)):
            add(str(B), decode_rows(Decode(B)))
    for name in filter(wanted, SEQUENCES):
        add(name, published_rows(name, shapes(name, 64)))
    for B in filter(lambda B: wanted(str(B)), BATCHES):
        add(str(B), published_rows(str(B), Decode(B)))


def warm(shapes, swept, share, of):
    """Compile what the run needs, a share per process; of kernels that tune themselves, a share of their configurations."""
    jobs = []
    for (kernel, shape), entries in CANDIDATES.items() if swept else ():
        for entry in entries:

            def job(kernel=kernel, shape=shape, entry=entry):
                saved = launch.TABLE[kernel]
                launch.TABLE[kernel] = {**saved, str(C): entry}
                case = shapes(shape)
                (case.forward() if kernel.startswith("chain") else case.backward())[0]()
                launch.TABLE[kernel] = saved

            jobs.append(job)
    native.tune(share, of)
    ours, theirs = [], []
    for name in SEQUENCES:
        for chunk, rows in ((C, sequence_rows), (64, published_rows)):
            ours += [lambda n=name, c=chunk, r=rows, i=i: list(r(n, shapes(n, c)))[i][2][0]() for i in range(5)]
        theirs.append(lambda n=name: [launches[0]() for row in sequence_rows(n, shapes(n)) for launches in row[3].values()])
    for B in (1, 64):
        ours += [lambda B=B, i=i: list(decode_rows(Decode(B)))[i][2][0]() for i in range(5)]
        ours.append(lambda B=B: list(published_rows(str(B), Decode(B)))[0][2][0]())
    theirs.append(lambda: [launches[0]() for row in decode_rows(Decode(1)) for launches in row[3].values()])
    for job in [*jobs[share::of], *ours[share::of], *theirs]:
        try:
            job()
        except IndexError:  # a shape with fewer rows
            continue
        except Exception as error:
            print("warm:", type(error).__name__, str(error)[:300], flush=True)


def warm_all(argv, processes=14, limit_s=150):
    """Compile in parallel processes, then return."""
    started = time.time()
    children = [subprocess.Popen([sys.executable, "-m", "bench.gdn", *argv, "--warm", str(i), str(processes)]) for i in range(processes)]
    for child in children:
        try:
            child.wait(max(1.0, limit_s - (time.time() - started)))
        except subprocess.TimeoutExpired:
            child.kill()


if __name__ == "__main__":
    need_gpu()
    if "--warm" not in sys.argv:
        warm_all(sys.argv[1:])
    main()
