"""The one table of measured times, bench/results.csv: its schema, its writer and its reader.

A row is one case on one device. A run replaces the rows that it measured and keeps the others, which say when and at which commit they were taken.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import subprocess
import sys
from pathlib import Path

COLUMNS = ("op", "stage", "shape", "ours_us", "native_us", "ratio", "native", "target", "clock", "device", "versions", "commit", "date", "note")
PATH = Path(__file__).with_name("results.csv")
#: What makes two rows the same case; the later one replaces the earlier.
CASE = ("op", "stage", "shape", "device")


def read(path=PATH) -> list[dict[str, str]]:
    """Rows of the table, [] where there is no file.

    Raises:
        ValueError: the file has other columns.
    """
    if not Path(path).exists():
        return []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}, found {', '.join(reader.fieldnames or ())}")
        return list(reader)


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """``old`` with every case of ``new`` replaced where it stands (once), and cases that it lacks at the end."""
    fresh = {tuple(row[name] for name in CASE): row for row in new}
    rows = []
    for row in old:
        case = tuple(row[name] for name in CASE)
        if case not in fresh:
            rows.append(row)
        elif fresh[case] is not None:
            rows.append(fresh[case])
            fresh[case] = None
    return rows + [row for row in fresh.values() if row is not None]


def write(rows: list[dict], path=PATH) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class Table:
    """Rows of one run, written as they come: a run that dies leaves what it measured.

    Args:
        path: of the table.
        commit: of the measured tree, where git is not at hand.
        packages: distributions on the native side, whose versions are noted where they are installed.
    """

    def __init__(self, path=PATH, commit: str = "", packages: tuple[str, ...] = ()):
        import torch
        import triton

        self.path, self.rows = Path(path), []
        self.stamp = dict(
            device=torch.cuda.get_device_name(),
            versions=", ".join([f"torch {torch.__version__}", f"triton {triton.__version__}", *_versions(packages)]),
            commit=commit or _head(),
            date=datetime.date.today().isoformat(),
        )

    def add(self, op, stage, shape, ours_us, native_us=None, native="", *, target=None, clock="", note="") -> None:
        """Add, print and store one case.

        Args:
            op, stage, shape: the case, e.g. ``"moe.combine", "forward", "256x8x2048"``.
            ours_us, native_us: medians of one run in microseconds; ``native_us`` None where nothing native was measured, and ``native`` says what was.
            target: ratio to reach, or None.
            clock: ``"graph"`` (replayed CUDA graphs), ``"events"`` or ``"host"`` (what the host waits, its own work included).
            note: how the figure was taken, where that is not plain.
        """
        ratio = "" if native_us is None else f"{ours_us / native_us:.3f}"
        shown = "" if native_us is None else f"{native_us:.1f}"
        row = dict(self.stamp, op=op, stage=stage, shape=str(shape), ours_us=f"{ours_us:.1f}", native_us=shown, ratio=ratio, native=native,
                   target="" if target is None else str(target), clock=clock, note=note)  # fmt: skip
        self.rows.append(row)
        write(merged(read(self.path), [row]), self.path)
        aim = f" (target {target})" if target is not None else ""
        print(f"{op:34} {stage:19} {shape:36} {ours_us:9.1f} {shown:>9} {ratio:>6}{aim}  {native}", flush=True)


def options(description: str, only: str) -> argparse.Namespace:
    """out, native, commit and only of this program's command line; packages in ``native`` can be imported then.

    Ends the program where there is no GPU.

    Args:
        description: of the program.
        only: what ``--only WORD`` chooses.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", default=PATH, help="table to write (default: %(default)s)")
    parser.add_argument("--native", default="", help="folder of the native packages, with vLLM's extensions (bench/native_vllm.py)")
    parser.add_argument("--commit", default="", help="of the measured tree, where git is not at hand")
    parser.add_argument("--only", default="", metavar="WORD", help=only)
    found = parser.parse_args()
    need_gpu()
    if found.native:
        sys.path.insert(0, found.native)
    return found


def need_gpu() -> None:
    """Ends the program with a message and status 1 where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("bench: no NVIDIA GPU is visible here. The times compare GPU kernels; run this on a GPU host. bench/results.csv is unchanged.")


def _versions(packages):
    for name in packages:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _head() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=PATH.parent)
    if done.returncode:
        raise SystemExit("bench: the commit of this tree is not known here; name it with --commit")
    return done.stdout.strip()
