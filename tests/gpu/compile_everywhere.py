"""Compiles every Triton launch of the op library for each architecture that the portable forms are for, without a GPU.

The launchers run on CPU tensors under a driver that compiles and starts nothing, so that what is compiled is what they launch, at the shapes of
models. A form that compiles is not proven: its bits are gated where it has run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.gpu import launches
from tests.gpu.sources import digests

ARCHITECTURES = (80, 89, 100)
RESULT = Path(__file__).with_name("compiled.json")


class Offline:
    """A Triton driver of one architecture without a device."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self):
        return self.architecture  # what kernels are cached by

    def get_current_stream(self, device):
        return 0


def compiled(architecture: int, cases):
    """-> {case: {kernel: shared memory in bytes} or the compiler's message}"""
    driver.set_active(Offline(architecture))
    run, found = JITFunction.run, {}

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        seen[f"{self.__name__}, {kernel.metadata.num_warps} warps"] = kernel.metadata.shared
        return kernel

    JITFunction.run = compile_only
    try:
        for name, case in cases:
            seen: dict[str, int] = {}
            try:
                case()
                found[name] = seen
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
            print(architecture, name, found[name], flush=True)
    finally:
        JITFunction.run = run
    return found


def share(job):
    architecture, part, parts = job
    torch.set_num_threads(1)
    return architecture, compiled(architecture, list(launches.every(launches.MODEL, "cpu"))[part::parts])


def parse(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.compile_everywhere", description=__doc__)
    parser.add_argument("result", metavar="RESULT.json", nargs="?", type=Path, default=RESULT, help="default: the committed one")
    parser.add_argument("parts", metavar="PARTS", nargs="?", type=int, default=1, help="processes that share the launches of an architecture")
    return parser.parse_args(arguments)


def main(result: Path, parts: int):
    found: dict[str, dict] = {f"sm_{a}": {} for a in ARCHITECTURES}
    launched = [name for name, _ in launches.every(launches.MODEL, "cpu")]
    jobs = [(a, part, parts) for part in range(parts) for a in ARCHITECTURES]
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), len(os.sched_getaffinity(0)))) as pool:
        for architecture, cases in pool.imap_unordered(share, jobs):  # written as they come: a run that is ended leaves what it compiled
            found[f"sm_{architecture}"].update(cases)
            missing = {a: [name for name in launched if name not in cases] for a, cases in found.items()}
            failed = {a: sorted(name for name, kernels in cases.items() if isinstance(kernels, str)) for a, cases in found.items()}
            ordered = {a: dict(sorted(cases.items())) for a, cases in found.items()}
            record = dict(triton=triton.__version__, sources=digests(), failed=failed, missing=missing, compiled=ordered)
            result.write_text(json.dumps(record, indent=1) + "\n")
    print(failed)
    return failed


if __name__ == "__main__":
    raise SystemExit(1 if any(main(**vars(parse())).values()) else 0)
