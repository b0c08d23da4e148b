"""What an older run left in a folder is set aside when another begins there: moved, and replaced only by what a later run left."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from isoexec.runtimes.skyrl.config import TrainConfig
from isoexec.runtimes.skyrl.resume import Checkpoint, step_of

_ASIDE = "previous"
_LATEST = "latest_ckpt_global_step.txt"
#: In ``isoexec.out``, of one run alone. Logs go on: each of their files and lines has its time.
_RESULTS = ("steps.jsonl", "summary.md", "tensorboard", "contract.json", "mismatch-*")


def set_aside(config: TrainConfig, resumed: Checkpoint | None) -> None:
    """Make room for a run that begins; call it when nothing can be refused any more.

    A new run finds no results and no checkpoints: both are in ``previous`` of the checkpoints' folder, in place of those of the run before.
    One that continues a checkpoint finds none of later steps, of which keeping the newest would keep those and remove its own.

    Args:
        config: resolved.
        resumed: what the run continues, or None.
    """
    out, root = Path(config.isoexec.out), Path(config.trainer.ckpt_path)
    if resumed is None:
        _start_anew(out, root)
    else:
        _continue(out, root, resumed.folder)


def _start_anew(out: Path, root: Path) -> None:
    found = [entry for name in _RESULTS for entry in out.glob(name)]
    checkpoints = [entry for name in (_LATEST, "global_step_*") for entry in root.glob(name)]
    if not checkpoints and not any(map(_holds_something, found)):
        shutil.rmtree(out / "tensorboard", ignore_errors=True)  # of a start that came to no step
        return
    for older in [entry for entry in root.glob(f"{_ASIDE}*") if re.fullmatch(rf"{_ASIDE}(-\d+)?", entry.name)]:
        shutil.rmtree(older)
    _move([*found, *checkpoints], root / _ASIDE)


def _holds_something(entry: Path) -> bool:
    """Whether it is worth more than what an earlier run left."""
    return entry.name.startswith("mismatch-") or (entry.name == "steps.jsonl" and entry.stat().st_size > 0)


def _continue(out: Path, root: Path, folder: Path) -> None:
    own = folder.parent == root.resolve()
    later = [entry for entry in root.glob("global_step_*") if not own or (step_of(entry) or 0) > step_of(folder)]
    if own:
        write_synced(root / _LATEST, str(step_of(folder)))  # first, so that it names a checkpoint whenever this is interrupted
    elif (root / _LATEST).exists():
        later.append(root / _LATEST)
    if not later:
        return
    target = _free(root)
    _move(later, target)
    if (out / "steps.jsonl").exists():  # the run drops its lines of the steps that it takes again
        shutil.copyfile(out / "steps.jsonl", target / "steps.jsonl")


def _free(root: Path) -> Path:
    """``previous``, or where that holds something, which may be what is resumed, ``previous-2`` and so on."""
    count, found = 1, root / _ASIDE
    while found.exists():
        count += 1
        found = root / f"{_ASIDE}-{count}"
    return found


def _move(entries: list[Path], target: Path) -> None:
    target.mkdir(parents=True)
    for entry in entries:
        shutil.move(entry, target / entry.name)


def write_synced(path: Path, text: str) -> None:
    """Write a file whole and onto the disk, or leave the old one."""
    scratch = path.with_name(f".{path.name}.partial")
    scratch.write_text(text)
    sync(scratch)
    os.replace(scratch, path)


def sync(path: Path) -> None:
    """Onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
