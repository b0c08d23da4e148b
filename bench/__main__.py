"""Measures all cases on a GPU host and draws the picture: ``make bench``, or ``python -m bench [--native DIR] [--commit HASH]``.

DIR holds native packages that the environment lacks (see bench/gdn.py). Each part runs in a process of its own: one that fails is named, the others count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from bench import plot, table

#: Measured against native kernels.
KERNELS = ("bench.ops", "bench.gdn", "bench.layers")
#: What recording, comparing and the contract cost, against the same without; bench.sync and bench.stack need the patched vLLM and Megatron.
COSTS = (("bench.recorder",), ("bench.manifest", "--device", "cuda"), ("bench.sync",), ("bench.stack",))


def commands(native: str, commit: str) -> list[list[str]]:
    """Words after ``python -m`` for each part."""
    of_commit = ["--commit", commit] if commit else []
    of_native = ["--native", native] if native else []
    return [[part, *of_native, *of_commit] for part in KERNELS] + [[*part, *of_commit] for part in COSTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--native", default="", help="folder with fla and vllm (kernels and extensions), if the environment has none")
    parser.add_argument("--commit", default="", help="of the measured tree, where git is not at hand")
    options = parser.parse_args()
    table.need_gpu()
    parts = commands(options.native, options.commit)
    failed = [part[0] for part in parts if subprocess.run([sys.executable, "-m", *part]).returncode]
    plot.main()
    if failed:
        raise SystemExit(f"bench: {' and '.join(failed)} failed, see above; what they measured before is in {table.PATH}")


if __name__ == "__main__":
    main()
