"""Digests that a CUDA graph writes: the kernels are captured with the pass, the host reads what they wrote after each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from isoexec.ops._trace.context import Rows
from isoexec.ops._trace.digest import several_row_digests

_ROWS_OF_A_SHEET = 512


class Column(NamedTuple):
    """Where the graph writes a field of a stage: row ``row`` of sheet ``sheet`` of part ``part``."""

    stream: tuple
    name: str
    part: int
    sheet: int
    row: int


class Captured:
    """A pass that is being captured, or has been.

    Digests are launched on a branch of the graph of their own, those of a layer together, beside what the pass computes next: a decode
    step's kernels are too small to fill a GPU, and one more after each of them would wait its turn. What they read is held until they are
    done.

    Attributes:
        streams, lists: of one pass, as the recorder keeps them (its rows are nobody's).
        columns: where each field of the streams is.
        parts: sheets [512, T] int64 by the rows that the runtime named one after the other (all of a step, those that are sampled).
        unread: weights whose digests the host takes after the first replay, with what it needs for that.
    """

    def __init__(self):
        self.streams: dict[tuple, object] = {}
        self.lists: dict[tuple, dict[tuple, int]] = {}
        self.columns: list[Column] = []
        self.parts: list[tuple[Rows, list[torch.Tensor]]] = []
        self.unread: list[tuple] = []
        self._places: dict[int, tuple[int, int, int]] = {}  # id of a row of a sheet -> where it is
        self._made: list[torch.Tensor] = []  # so that an id stays one row's
        self._used = 0
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []  # (rows to digest, where to)
        self._work: list[tuple[Callable[[], object], object]] = []  # (what else is to be launched, what it reads)
        self._side: torch.cuda.Stream | None = None
        self._reading: tuple[torch.cuda.Event, list] | None = None

    def part(self, rows: Rows) -> None:
        """The digests that follow are of these rows."""
        self.flush()
        self.parts.append((rows, []))
        self._used = 0

    def digests(self, x: torch.Tensor) -> torch.Tensor:
        """[T] int64 that is going to hold the digests of the rows of ``x`` at every replay."""
        row = self._row(x.device)
        self._rows.append((x, row))
        return row

    def written(self, device: torch.device, write: Callable[[torch.Tensor], object], reads: torch.Tensor) -> torch.Tensor:
        """[T] int64 that ``write`` is going to fill at every replay; ``reads`` is held until it has."""
        row = self._row(device)
        self._work.append((lambda: write(row), reads))
        return row

    def _row(self, device: torch.device) -> torch.Tensor:
        rows, sheets = self.parts[-1]
        if not sheets or self._used == _ROWS_OF_A_SHEET:
            sheets.append(torch.empty(_ROWS_OF_A_SHEET, len(rows.sequence), dtype=torch.int64, device=device))
            self._used = 0
        row = sheets[-1][self._used]
        self._places[id(row)] = len(self.parts) - 1, len(sheets) - 1, self._used
        self._made.append(row)
        self._used += 1
        return row

    def add(self, row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """``row``, to which ``other`` is going to be added."""
        self._work.append((lambda: row.add_(other), None))
        return row

    def flush(self) -> None:
        """Launch what has been asked for, after what the pass has launched so far."""
        rows, work = self._rows, self._work
        self._rows, self._work = [], []
        if not rows and not work:
            return

        def launch():
            several_row_digests(rows)
            for write, _ in work:
                write()

        _, sheets = self.parts[-1]
        if not sheets[0].is_cuda:
            launch()
            return
        main = torch.cuda.current_stream(sheets[0].device)
        self._side = self._side or torch.cuda.Stream(sheets[0].device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            launch()
        self._join()
        self._reading = self._side.record_event(), [rows, work]

    def _join(self) -> None:
        """What the last digests read may be overwritten by what the pass launches from here on."""
        if self._reading is not None:
            torch.cuda.current_stream(self._side.device).wait_event(self._reading[0])
            self._reading = None

    def end(self) -> None:
        """The pass is captured: note where everything is."""
        self.flush()
        self._join()
        self.columns = [
            Column(key, name, *self._places[id(row)])
            for key, stream in self.streams.items()
            for _, chunk in stream.chunks
            for name, row in chunk.items()
        ]
        # A sheet's used rows alone are read.
        used = {(c.part, c.sheet): 0 for c in self.columns}
        for _, part, sheet, row in ((c.name, c.part, c.sheet, c.row) for c in self.columns):
            used[part, sheet] = max(used[part, sheet], row + 1)
        self.parts = [
            (rows, [sheet[: used.get((part, n), 0)] for n, sheet in enumerate(sheets)]) for part, (rows, sheets) in enumerate(self.parts)
        ]
        self._places, self._made = {}, []


class Replay(NamedTuple):
    """A replay: whose rows each part held, copies of its sheets, and whether its pass went on after the graph."""

    captured: Captured
    rows: list[Rows]
    sheets: list[list[torch.Tensor]]
    goes_on: bool = False

    def chunk(self, columns: list[Column]) -> tuple[Rows, dict[str, torch.Tensor]]:
        """Rows and fields of a stage, as a pass that was not captured leaves them."""
        rows = self.rows[columns[0].part]
        found = {c.name: self.sheets[c.part][c.sheet][c.row][: len(rows.sequence)] for c in columns}
        if rows.keep is not None:
            found = {name: row[rows.keep.to(row.device)] for name, row in found.items()}
        return rows, found
