"""Summary, table, picture and progress lines of a run's steps."""

import io
import json
import math
import time

import pytest

from isoexec.contract import ContractError
from isoexec.train import report
from isoexec.train.progress import Watch


def steps(mismatch=0.0, count=3):
    rows = [dict(step=0, eval={"all/pass_rate": 0.4})]
    for i in range(1, count + 1):
        rows.append(
            dict(
                step=i, reward=0.3 + i / 10, pass_rate=0.3 + i / 10, bit_equal=1.0 if mismatch == 0 else 0.25,
                first_minibatch_ratio_min=1 - mismatch,
                first_minibatch_rollout_ratio_min=1.0, first_minibatch_rollout_ratio_max=1 + 2 * mismatch,
                first_minibatch_ratio_max=1.0, first_minibatch_clip_fraction=0.0, loss=0.1, grad_norm=1.0,
                seconds=dict(generate=2.0, train=1.0 * i, score=0.5, step=4.0),
                **{f"{report.MISMATCH}_{kind}": mismatch for kind in ("mean", "max", "std")},
            )
        )  # fmt: skip
    rows[-1]["eval"] = {"all/pass_rate": 0.65}
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_summary_says_what_happened(tmp_path):
    found = report.summary(report.read(write(tmp_path / "steps.jsonl", steps())), "isoexec")
    assert found.steps == 3 and found.held_out == (0.4, 0.65) and found.pass_rate == pytest.approx((0.4, 0.6))
    assert found.mismatch_max == 0 and found.bit_equal == 1
    assert found.ratio_deviation == found.rollout_ratio_deviation == 0 and found.seconds_train == 2.5
    table = report.text([report.summary(steps(1e-9), "native"), found])
    assert "40.00 % -> 65.00 % (+25.0 points)" in table
    row = next(line for line in table.splitlines() if "largest difference" in line)
    assert row.split("|")[2].strip() == "1e-09" and row.split("|")[3].strip() == "0"
    row = next(line for line in table.splitlines() if "engine's probabilities" in line)
    assert row.split("|")[2].strip() == "2e-09" and row.split("|")[3].strip() == "0"
    assert len({len(line) for line in table.splitlines()}) == 1


@pytest.mark.parametrize("left_out, shown", [(0, "- -> 65.00 % "), (-1, "40.00 % -> - ")])
def test_one_evaluation_is_not_shown_as_two(left_out, shown):
    rows = steps()
    del rows[left_out]["eval"]
    row = next(line for line in report.text([report.summary(rows, "isoexec")]).splitlines() if "held-out" in line)
    assert shown in row and "points" not in row


def test_nothing_is_rounded_to_perfect():
    assert report.share(1 - 1e-9) == "99.99 %" and report.share(1.0) == "100 %" and report.share(1e-9) == "0.01 %"
    assert report.number(1e-12) == "1e-12" and report.number(0.0) == "0"


def test_not_finite_is_said_and_never_hidden(tmp_path):
    rows = steps()
    rows[2][f"{report.MISMATCH}_max"] = math.nan
    found = report.summary(rows, "native")
    assert math.isnan(found.mismatch_max) and "not finite" in report.text([found])
    report.write_json(tmp_path / "a.json", found.as_dict())
    assert json.loads((tmp_path / "a.json").read_text())["mismatch_max"] is None


@pytest.mark.parametrize(
    "content, message", [("", "expected steps"), ("{}\n", "line 1: expected a step"), ("x\n", "line 1"), ('{"step": 1', "expected steps")]
)
def test_a_file_without_steps_is_one_message(tmp_path, content, message):
    (tmp_path / "s.jsonl").write_text(content)
    with pytest.raises(ContractError, match=message):
        report.read(tmp_path / "s.jsonl")
    with pytest.raises(ContractError, match="did the run end before its first step"):
        report.read(tmp_path / "none.jsonl")


def test_picture_draws_both_arms(tmp_path):
    path = tmp_path / "dapo.png"
    report.picture(path, {"native": steps(1e-3), "isoexec": steps()})
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_progress_shows_each_finished_step_once(tmp_path):
    path, stream = write(tmp_path / "steps.jsonl", [dict(step=99)]), io.StringIO()
    with Watch(path, 3, stream=stream):
        assert path.exists()  # a run that is refused leaves what was there
        with path.open("w") as file:
            for row in steps():
                file.write(json.dumps(row) + "\n")
                file.flush()
                time.sleep(0.3)
            file.write('{"step": 4, "loss"')
    lines = stream.getvalue().splitlines()
    assert [line.split("/3")[0].split()[-1] for line in lines] == ["0", "1", "2", "3"]
    assert "bits equal 100 %" in lines[1] and "held-out 65.00 %" in lines[3]


def test_a_resumed_run_shows_the_steps_it_takes_again(tmp_path):
    path, stream = write(tmp_path / "steps.jsonl", steps()[:3]), io.StringIO()
    with Watch(path, 3, stream=stream):
        write(path, steps()[:2])
        time.sleep(0.7)
        write(path, steps())
    assert [line.split("/3")[0].split()[-1] for line in stream.getvalue().splitlines()] == ["2", "3"]
