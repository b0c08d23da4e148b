"""The table, ``verify.json`` and ``verify.png``."""

from __future__ import annotations

import json
import math
from pathlib import Path

from isoexec.verify.compare import Comparison

_COLUMNS = ("model", "setting", "arm", "tokens", "mean |d|", "max |d|", "std |d|", "bits equal", "rows equal")
_COLOURS = {"native": "#c44e52", "isoexec": "#4c72b0"}


def table(runs: list[dict]) -> str:
    """The ``runs`` of verify.json as aligned text, the arms of a setting together; d is engine minus trainer in nats."""
    settings = _settings([(r["model"], r["setting"], r["arm"]) for r in runs])
    runs = sorted(runs, key=lambda r: settings.index((r["model"], r["setting"])))
    rows = [_COLUMNS] + [_cells(r) for r in runs]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))) for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


def write_json(path: Path, comparisons: list[Comparison], details: dict) -> None:
    """``{"runs": [...], ...details}``; not-finite statistics are null."""
    document = {"runs": [c.as_run() for c in comparisons], **details}
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_picture(path: Path, comparisons: list[Comparison]) -> None:
    """Distribution of |d| in both arms, tokens that are exactly equal as a bar of their own, and the largest |d| of every setting."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    height = 2.2 + 0.3 * max(len({c.setting for c in comparisons}), len({(c.model, c.setting) for c in comparisons}) / 2.5)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, height), layout="constrained")
    _draw_distribution(left, comparisons)
    _draw_settings(right, comparisons)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _cells(run: dict) -> tuple[str, ...]:
    if run.get("not_run"):
        return (run["model"], run["setting"], run["arm"], "not run", *"-----")
    statistics = [_number(run[name]) for name in ("mean_abs", "max_abs", "std_abs")]
    names = (run["model"], run["setting"], run["arm"], str(run["tokens"]))
    return (*names, *statistics, _share(run["bit_equal"]), _share(run["rows_equal"]))


def _settings(entries: list[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """(model, setting) of (model, setting, arm) ``entries`` in the order of the isoexec arm, which has every setting."""
    ordered = sorted(entries, key=lambda entry: entry[2] != "isoexec")
    return list(dict.fromkeys((model, setting) for model, setting, _ in ordered))


def _number(value: float | None) -> str:
    if value is None:
        return "not finite"
    return "0" if value == 0 else f"{value:.2e}"


def _share(value: float | None) -> str:
    """A percentage that says 100 only when every one is equal."""
    if value is None:
        return "-"
    return "100 %" if value == 1 else f"{min(value * 100, 99.99):.2f} %"


def _sizes(comparisons: list[Comparison], arm: str) -> list[float]:
    return [abs(d) for c in comparisons if c.arm == arm for d in c.differences if math.isfinite(d)]


def _arms(comparisons: list[Comparison]) -> list[str]:
    return [arm for arm in _COLOURS if any(c.arm == arm for c in comparisons)]


def _draw_distribution(axes, comparisons: list[Comparison]) -> None:
    decades, per_decade = range(-8, 2), 4
    edges = [10 ** (d + i / per_decade) for d in decades for i in range(per_decade)]
    zero = 10**-9.7  # where the bar of exact zeros is drawn
    for offset, arm in enumerate(_arms(comparisons)):
        sizes = _sizes(comparisons, arm)
        total = max(len(sizes), 1)
        kept = [max(s, edges[0]) for s in sizes if s]
        weights = [1 / total] * len(kept)
        axes.hist(kept, bins=edges, weights=weights, alpha=0.75, color=_COLOURS[arm], label=f"{arm} ({len(sizes)} tokens)")
        share = (len(sizes) - len(kept)) / total
        left = zero * 10 ** (offset * 0.4 - 0.3)
        axes.bar(left, share, width=left * 1.2, align="edge", color=_COLOURS[arm], alpha=0.75)
        axes.annotate(f"{share:.1%}" if share < 1 else "100%", (left * 1.5, share), ha="center", va="bottom", fontsize=8)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.12)
    ticks = [zero, *(10.0**d for d in range(-8, 1, 2))]
    axes.set_xticks(ticks, ["exactly\n0", *(f"$10^{{{d}}}$" for d in range(-8, 1, 2))])
    axes.set_xlabel("|engine logprob − trainer logprob|, nats")
    axes.set_ylabel("share of tokens")
    axes.set_title("Difference of the two sides, all settings")
    axes.legend(frameon=False)


def _draw_settings(axes, comparisons: list[Comparison]) -> None:
    """A row for each setting, in it a line for each model, from mean to largest difference."""
    pairs = _settings([(c.model, c.setting, c.arm) for c in comparisons])
    models, settings = (list(dict.fromkeys(names)) for names in zip(*pairs))
    markers = dict(zip(models, "os^Dv<>Pp*"))
    for c in comparisons:
        if not c.finite:
            continue
        y = settings.index(c.setting) + (models.index(c.model) - (len(models) - 1) / 2) * 0.8 / len(models)
        statistics, colour = c.statistics(), _COLOURS[c.arm]
        axes.plot([statistics["mean_abs"], statistics["max_abs"]], [y, y], "-", color=colour, linewidth=1)
        axes.plot(statistics["mean_abs"], y, markers.get(c.model, "o"), color=colour, markersize=4)
        axes.plot(statistics["max_abs"], y, "|", color=colour, markersize=6)
    if len(models) > 1:
        shapes = [axes.plot([], [], markers.get(model, "o"), color="grey", markersize=4, label=model)[0] for model in models]
        axes.legend(handles=shapes, fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.4, 0.0))
    axes.set_xscale("symlog", linthresh=1e-6)
    axes.set_xlim(left=-2e-7)
    axes.set_yticks(range(len(settings)), settings, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("mean (marker) and largest (bar) difference, nats")
    axes.set_title("By setting")
