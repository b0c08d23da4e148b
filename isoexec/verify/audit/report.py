"""What an audit found, as data and as text."""

from __future__ import annotations

import contextlib
from collections import Counter

from isoexec.contract import CASES

CLEAN, STRAY, BAD_INPUT, INCONCLUSIVE = 0, 1, 2, 3
VERDICTS = {CLEAN: "clean", STRAY: "stray", BAD_INPUT: "bad input", INCONCLUSIVE: "inconclusive"}


@contextlib.contextmanager
def evidence(recorder):
    """A dict that is filled when the block ends.

    ``cases``: for every case that ran, ``ops`` (calls of isoexec ops), ``inside`` (calls that torch dispatched within them) and ``outside``
    (floating-point calls without an op, allowed ones included, as [op, kind, count]). ``served``: calls as [op, case, implementation,
    count]. ``strays``: a dict for each :class:`~isoexec.verify.audit.recorder.Stray`, with its ``count``.
    """
    from isoexec.ops._core import registry

    before = Counter(registry.served())
    found: dict = {}
    yield found
    served = Counter(registry.served()) - before
    calls: Counter[str] = Counter()
    for (_, case, _), count in served.items():
        calls[case] += count
    found["cases"] = {
        case: {
            "ops": calls[case],
            "inside": recorder.inside[case],
            "outside": sorted([op, kind, count] for (c, op, kind), count in recorder.outside.items() if c == case),
        }
        for case in CASES
        if calls[case]
    }
    found["served"] = [[*key, count] for key, count in served.items()]
    found["strays"] = [stray._asdict() | {"count": count} for stray, count in recorder.strays.items()]


def case_rows(model: str, cases: dict) -> list[tuple[str, ...]]:
    """A row per case of one model: how much was watched, and how much of it strayed."""
    return [
        (
            model,
            case,
            str(found["ops"]),
            str(found["inside"]),
            str(sum(count for *_, count in found["outside"])),
            str(sum(s["count"] for s in found["strays"])),
        )
        for case, found in cases.items()
    ]


def stray_rows(model: str, cases: dict) -> list[tuple[str, ...]]:
    """A row per op and call site of one model; layers that agree in both share a row."""
    rows: dict[tuple, tuple[int, set]] = {}
    for case, found in cases.items():
        for s in found["strays"]:
            where = f"{s['file']}:{s['line']}" if s["file"] else "(device profile)"
            key = (case, s["op"], s["kind"], s["dtypes"], where, s["function"])
            count, layers = rows.get(key, (0, set()))
            rows[key] = count + s["count"], layers | {s["layer"]}
    ordered = sorted(rows.items(), key=lambda row: (CASES.index(row[0][0]), row[0][4]))
    return [(model, case, op, kind, dtypes, str(count), f"{where} {function}".rstrip(), _layers(layers))
            for (case, op, kind, dtypes, where, function), (count, layers) in ordered]  # fmt: skip


CASE_COLUMNS = ("model", "case", "isoexec ops", "calls inside", "calls outside", "stray")
STRAY_COLUMNS = ("model", "case", "op", "kind", "dtypes", "count", "file:line", "layer")


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Aligned text; numbers to the right."""
    cells = [columns, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]

    def line(row):
        return "  ".join(c.rjust(w) if c.isdigit() else c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()

    return "\n".join([line(columns), "  ".join("-" * w for w in widths), *map(line, rows)])


def _layers(layers: set[int | None]) -> str:
    """``0-3, 5``; ``-`` for what no layer ran."""
    numbers = sorted(layer for layer in layers if layer is not None)
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join((["-"] if None in layers else []) + text)
