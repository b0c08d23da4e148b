"""The table of measured times: one schema, and a run replaces what it measured and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import __main__, table

ROOT = Path(__file__).parents[2]


def _row(op, shape, ours, device="NVIDIA H200"):
    return dict(dict.fromkeys(table.COLUMNS, ""), op=op, stage="forward", shape=shape, ours_us=ours, device=device)


def test_every_row_says_how_it_was_measured():
    rows = table.read()
    assert rows
    for row in rows:
        assert all(row[name] for name in ("op", "stage", "shape", "ours_us", "clock", "device", "versions", "commit", "date")), row
        assert row["clock"] in ("graph", "events", "host")
        assert bool(row["ratio"]) == bool(row["native_us"]), row
        if row["ratio"]:
            assert abs(float(row["ratio"]) - float(row["ours_us"]) / float(row["native_us"])) <= 0.06 * float(row["ratio"]) + 0.006, row


def test_a_run_replaces_the_cases_it_measured():
    old = [_row("a", "1", "10"), _row("b", "1", "20"), _row("a", "1", "11"), _row("a", "1", "12", "another device")]
    rows = table.merged(old, [_row("a", "1", "5"), _row("c", "1", "7")])
    assert [(r["op"], r["ours_us"]) for r in rows] == [("a", "5"), ("b", "20"), ("a", "12"), ("c", "7")]


def test_a_table_of_other_columns_is_refused(tmp_path):
    file = tmp_path / "results.csv"
    table.write([_row("a", "1", "10")], file)
    assert table.read(file) == [_row("a", "1", "10")]
    file.write_text(file.read_text().replace("clock", "timer"))
    with pytest.raises(ValueError, match="expected the columns"):
        table.read(file)


@pytest.mark.parametrize("words", [["bench"], *__main__.commands("", "abc")[-len(__main__.COSTS) :]], ids=lambda words: words[0])
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(words):
    run = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "no NVIDIA GPU" in run.stderr and "Traceback" not in run.stderr
