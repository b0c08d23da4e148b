"""Bars of ours against native from results.csv: ``python -m bench.plot [results.csv] [results.png]``."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench import table

WIDEST = 4.0  # a longer bar is cut there, and says its ratio


def main(source=table.PATH, picture=Path(__file__).with_name("results.png")):
    rows = [row for row in table.read(source) if row["ratio"]]
    names = [f"{row['op']} {row['stage']} {row['shape']}" for row in rows]
    ratios = [float(row["ratio"]) for row in rows]
    met = [not row["target"] or ratio <= float(row["target"]) for row, ratio in zip(rows, ratios)]
    figure, axes = plt.subplots(figsize=(10, 0.22 * len(rows) + 1.2))
    axes.barh(range(len(rows)), [min(ratio, WIDEST) for ratio in ratios], color=["#4878a8" if ok else "#c8553d" for ok in met])
    for y, row in enumerate(rows):
        if row["target"]:
            axes.plot([float(row["target"])] * 2, [y - 0.4, y + 0.4], color="black")
        if ratios[y] > WIDEST:
            axes.text(WIDEST, y, f" {ratios[y]:.3g}", fontsize=7, va="center")
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.set_ylim(-1, len(rows))
    axes.axvline(1.0, color="grey", linestyle=":")
    axes.invert_yaxis()
    axes.set_xlabel("time, ours / best native measured (black: target; red: missed)")
    axes.set_title(", ".join(sorted({row["device"] for row in rows})))
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
