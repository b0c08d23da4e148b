"""Record both runtimes on the same tokens, compare, and look again at the token that differs first."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isoexec.verify.trace import bundle
from isoexec.verify.trace.bundle import Sequence
from isoexec.verify.trace.compare import Divergence
from isoexec.verify.trace.report import Report, open_report

#: Runs one runtime; its argument is what :func:`isoexec.verify.trace.worker.recording` takes.
Runner = Callable[[dict], object]


@dataclass(frozen=True)
class Traced:
    """How to run both sides again, on the same tokens with the same bits.

    Attributes:
        engine: samples the sequences.
        trainer: scores them.
        numbers: sequence number of each prompt in the order of the engine's requests, or None where it is that order.
    """

    engine: Runner
    trainer: Runner
    numbers: list[int] | None = None


def trace(
    traced: Traced,
    sequences: Callable[[], dict[int, Sequence]],
    file: Path,
    about: dict,
    *,
    level: str = "state",
    only: list[int] | None = None,
) -> Report:
    """Record, compare and write a bundle.

    Args:
        traced: both sides.
        sequences: the sequences with both sides' logprobs; asked after the first pass.
        file: bundle to write.
        about: JSON values for the bundle.
        level: what to record.
        only: numbers of the sequences to record, or None for all.

    Returns:
        The comparison. Where a token differs, the bundle holds its rows, which a second pass keeps.
    """
    work = Path(tempfile.mkdtemp(prefix="isoexec-trace-"))
    try:
        common = {"level": level, "sequences": only}
        first = _record(traced, work, "digests", common)
        bundle.join(file, sequences(), [(side, None) for side in first], about)
        found = open_report([file])
        divergence = found.compared.first
        if isinstance(divergence, Divergence) and divergence.fields:
            wanted = [[*divergence.where, divergence.sequence, divergence.position]]
            second = _record(traced, work, "rows", {"level": "ops", "sequences": [divergence.sequence], "wanted": wanted})
            bundle.join(file, sequences(), list(zip(first, second)), about)
            found = open_report([file])
        return found
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _record(traced: Traced, work: Path, name: str, options: dict) -> list[Path]:
    files = [work / f"{side}-{name}.zip" for side in ("engine", "trainer")]
    traced.engine(options | {"file": str(files[0]), "numbers": traced.numbers})
    traced.trainer(options | {"file": str(files[1])})
    return files
