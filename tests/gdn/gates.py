"""Gates of the GPU backend, run on a machine with a GPU and recorded with commit, date and verdict:

    python -m tests.gdn.gates [results.json] [--only GATE ...] [--processes N] [--commit HASH] [--rest]

The record is written as gates end, so a run that is cut leaves what passed; --rest runs the others at the same commit and completes it.
`accuracy` compares with fla-core's chunk kernel, which must be importable. tests/gdn/gpu_results.json is the last complete record;
test_gpu.py runs the same gates where there is a GPU, and holds the record against the kernels as they are.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib.metadata
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import torch

from isoexec.ops.gdn import launch
from tests.gdn import gates_backward, gates_core, gates_edges

#: Forms of the core and chunk sizes that pass every gate of the core.
CASES = (("cpr_wy", 16), ("cpr", 16), ("cpr", 64), ("cpr_wy", 32))
CORE = (gates_core.case_parity, gates_core.single_steps, gates_core.packing, gates_core.empty_batches,
        gates_core.poisoned_workspaces, gates_core.tiles, gates_core.other_tiles, gates_core.decode_tiles,
        gates_core.many_sequences, gates_core.hostile_values, gates_core.inert_lanes, gates_core.paged_views,
        gates_core.graph_replay, gates_core.launches, gates_core.accuracy,
        gates_core.negative_controls, gates_backward.backward)  # fmt: skip
#: Of `cpr_wy` alone, at the C that its kernel is for.
WHOLE = {f"{gates_core.whole_chunks.__name__}[cpr_wy C={chunk}]": (gates_core.whole_chunks, "cpr_wy", chunk) for chunk in (16, 32)}
#: Run at C = 16 alone.
OTHERS = (gates_backward.backward_tiles, gates_edges.edges, gates_edges.edges_gradient, gates_edges.step, gates_edges.step_graphs)
PACKAGES = ("torch", "triton", "fla-core", "tilelang", "vllm")


def jobs() -> dict[str, tuple]:
    """Name -> (gate, *arguments), the slow ones first."""
    found = {f"{gate.__name__}[{form} C={chunk}]": (gate, form, chunk) for form, chunk in CASES for gate in CORE}
    found |= WHOLE
    found |= {f"{gate.__name__}[C=16]": (gate, 16) for gate in OTHERS}
    slow = ("tiles", "other_tiles", "decode_tiles", "accuracy", "backward_tiles", "edges_gradient", "edges", "many_sequences")
    return dict(sorted(found.items(), key=lambda job: (job[0].split("[")[0] not in slow, "64" not in job[0])))


def run(name: str) -> dict:
    """Result of one gate; its failure is a result too."""
    gate, *arguments = jobs()[name]
    started = time.time()
    try:
        result = {"passed": True, **(gate(*arguments) or {})}
    except Exception as error:
        result = {"passed": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(name, result, f"{time.time() - started:.1f}s", flush=True)
    return result


def record(commit: str, results: dict[str, dict]) -> dict:
    """What is kept of a run. The verdict is ``"passed"`` where every gate has run and passed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    unproven = [name for name in sorted(jobs()) if not results.get(name, {}).get("passed")]
    return {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": versions,
        "kernels": launch.digest(),
        "verdict": "failed" if unproven else "passed",
        "open": unproven,
        "gates": {name: results[name] for name in sorted(results)},
    }


def passed_before(path: str, commit: str, kernels: str, device: str) -> dict[str, dict]:
    """Passed gates of the record at ``path``, none where it is of another commit, other kernels, another device or not there."""
    file = Path(path)
    found = json.loads(file.read_text()) if file.is_file() else {}
    if (found.get("commit"), found.get("kernels"), found.get("device")) != (commit, kernels, device):
        return {}
    return {name: result for name, result in found["gates"].items() if result["passed"] and name in jobs()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="where the record is written")
    parser.add_argument("--only", nargs="+", default=[], help="gates by name, with or without their case")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--commit", default="", help="of this tree, where git is not at hand")
    parser.add_argument("--rest", action="store_true", help="keep what has passed in the record at PATH, of this commit, and run the others")
    options = parser.parse_args()
    if options.rest and not options.path:
        parser.error("--rest: name the record to complete")
    commit = options.commit or subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], text=True).strip()
    chosen = [name for name in jobs() if not options.only or name in options.only or name.split("[")[0] in options.only]
    results = passed_before(options.path, commit, launch.digest(), torch.cuda.get_device_name()) if options.rest else {}
    chosen = [name for name in chosen if name not in results]
    found = record(commit, results)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=context) as workers:
        waiting = {workers.submit(run, name): name for name in chosen}
        for job in concurrent.futures.as_completed(waiting):
            try:
                results[waiting[job]] = job.result()
            except Exception as error:  # the process died
                results[waiting[job]] = {"passed": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            found = record(commit, results)
            if options.path:
                Path(options.path).write_text(json.dumps(found, indent=1) + "\n")
    print(f"gates: {found['verdict']}, {len(results)} run", *(f"not passed: {name}" for name in found["open"]), sep="\n")
    return len([name for name in chosen if not results[name]["passed"]])


if __name__ == "__main__":
    sys.exit(main())
