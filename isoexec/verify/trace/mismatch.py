"""What `isoexec verify` does on its first mismatch: run that setting again with every op recorded, and say what differs first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from isoexec.verify.protocol import OperationFailed
from isoexec.verify.trace.bundle import Sequence
from isoexec.verify.trace.report import Report, as_json, lines
from isoexec.verify.trace.run import Traced, trace

#: Sequences that are recorded: the first ones that differ.
MOST_SEQUENCES = 4


@dataclass(frozen=True)
class Mismatch:
    """Two sides that scored the same tokens differently.

    Attributes:
        name: of model, setting and scoring, for the file and the report.
        prompts, tokens: of every sequence.
        engine, trainer: logprobs of every sequence as fp32 bit patterns.
        rows: row digests of both sides by sequence, or None.
        traced: how to run both again.
        about: JSON values for the bundle.
        level: what to record.
    """

    name: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    engine: list[list[int]]
    trainer: list[list[int]]
    rows: tuple[list, list] | None
    traced: Traced
    about: dict
    level: str = "state"

    def different(self) -> list[int]:
        """Sequences whose logprobs or rows differ."""
        rows = self.rows or ([None] * len(self.engine),) * 2
        return [n for n, (a, b, x, y) in enumerate(zip(self.engine, self.trainer, *rows)) if a != b or (x and y and x != y)]


@dataclass(frozen=True)
class Traceback:
    """A trace of a mismatch: where its bundle is, and what it found (or why nothing)."""

    file: Path | None
    report: Report | None
    failure: str = ""

    def lines(self) -> list[str]:
        """For a person."""
        if self.report is None:
            return [f"the trace of the mismatch failed: {self.failure}"]
        found = lines(self.report)
        if self.report.verdict == "identical":
            found.insert(1, "  note       the mismatch did not come back when the setting was run again: it depends on what ran before")
        return [f"trace of the first mismatch: {self.file}", *found, f"  page       isoexec trace compare {self.file} --html trace.html"]

    def as_json(self) -> dict:
        """For ``verify.json``."""
        if self.report is None:
            return {"failure": self.failure}
        found = as_json(self.report)
        found.pop("environments")  # the bundle has them
        return {"file": str(self.file), **found}


def trace_mismatch(mismatch: Mismatch, out: Path) -> Traceback:
    """Trace into ``out/trace-<name>.zip``. An operation that fails is told, not raised: the mismatch is the verdict."""
    file = out / f"trace-{re.sub(r'[^A-Za-z0-9.]+', '-', mismatch.name).strip('-')}.zip"

    def sequences() -> dict[int, Sequence]:
        sides = zip(mismatch.prompts, mismatch.tokens, mismatch.engine, mismatch.trainer)
        return {n: Sequence(p + t, len(p), {"engine": a, "trainer": b}) for n, (p, t, a, b) in enumerate(sides)}

    only = mismatch.different()[:MOST_SEQUENCES]
    try:
        return Traceback(file, trace(mismatch.traced, sequences, file, mismatch.about, level=mismatch.level, only=only))
    except OperationFailed as error:
        return Traceback(None, None, str(error))
