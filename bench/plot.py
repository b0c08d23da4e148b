"""Bars of ours against native from results.csv: ``python bench/plot.py [results.csv] [results.png]``."""

import csv
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(source="bench/results.csv", picture="bench/results.png"):
    with open(source) as file:
        rows = [row for row in csv.DictReader(file) if row["ratio"]]
    names = [f"{row['op']} {row['stage']} {row['shape']}" for row in rows]
    ratios = [float(row["ratio"]) for row in rows]
    met = [not row["target"] or ratio <= float(row["target"]) for row, ratio in zip(rows, ratios)]
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(rows) + 1.2))
    axes.barh(names, ratios, color=["#4878a8" if ok else "#c8553d" for ok in met])
    for y, row in enumerate(rows):
        if row["target"]:
            axes.plot([float(row["target"])] * 2, [y - 0.4, y + 0.4], color="black")
    axes.axvline(1.0, color="grey", linestyle=":")
    axes.invert_yaxis()
    axes.set_xlabel("time, ours / best native measured (black: target; red: missed)")
    axes.set_title(rows[0]["device"])
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
