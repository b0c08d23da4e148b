"""Measures all cases on a GPU host and draws the picture: ``make bench``, or ``python -m bench [--native DIR] [--commit HASH]``.

DIR holds native packages that the environment lacks (see bench/gdn.py). Each part runs in a process of its own: one that fails is named, the others count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from bench import plot, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--native", default="", help="folder with fla and vllm (kernels and extensions), if the environment has none")
    parser.add_argument("--commit", default="", help="of the measured tree, where git is not at hand")
    options = parser.parse_args()
    table.need_gpu()
    common = [word for name in ("native", "commit") if (value := getattr(options, name)) for word in (f"--{name}", value)]
    failed = [part for part in ("bench.ops", "bench.gdn", "bench.layers") if subprocess.run([sys.executable, "-m", part, *common]).returncode]
    plot.main()
    if failed:
        raise SystemExit(f"bench: {' and '.join(failed)} failed, see above; what they measured before is in {table.PATH}")


if __name__ == "__main__":
    main()
