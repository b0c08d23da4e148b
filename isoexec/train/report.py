"""What a run did, from its ``steps.jsonl``: a summary to paste, and two arms side by side."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from isoexec.contract import ContractError
from isoexec.runtimes.skyrl.lines import read_steps

MISMATCH = "rollout_train_logprobs_abs_diff"
_COLOURS = {"native": "#c44e52", "isoexec": "#4c72b0"}
#: Where the pass rate on held-out problems is: the share of rewards of 1 or more, as the pass rate of a step.
_HELD_OUT = "all/pass_rate"


@dataclass(frozen=True)
class Summary:
    """Of one arm. Times are medians over the steps, in seconds; None where the run did not write it.

    Attributes:
        held_out: pass rate on held-out problems before the first step, and at the last evaluation after one.
        reward, pass_rate: of the first and of the last step.
        mismatch_mean: mean over the steps of their mean difference; ``mismatch_max``: largest of any token.
        bit_equal: smallest share of tokens with equal bits of any step.
        ratio_deviation: largest |ratio - 1| on the first minibatch of a step, of the importance ratio; ``rollout_ratio_deviation``: of the
            ratio to the probabilities that the engine sampled with.
        clip_fraction: largest share of clipped tokens on the first minibatch of a step.
    """

    arm: str
    steps: int
    held_out: tuple[float | None, float | None]
    reward: tuple[float | None, float | None]
    pass_rate: tuple[float | None, float | None]
    mismatch_mean: float | None
    mismatch_max: float | None
    bit_equal: float | None
    ratio_deviation: float | None
    rollout_ratio_deviation: float | None
    clip_fraction: float | None
    seconds_generate: float | None
    seconds_train: float | None
    seconds_step: float | None

    def as_dict(self) -> dict:
        """Plain data."""
        return dataclasses.asdict(self)


def write_json(path: Path, document: dict) -> None:
    """Numbers that are not finite, which JSON does not have, are null."""
    path.write_text(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read(path: Path) -> list[dict]:
    """The steps of a run. A last line that was not finished is left out.

    Raises:
        ContractError: no such file, no step in it, or a line that is no step.
    """
    if not path.exists():
        raise ContractError(f"{path}: no such file; did the run end before its first step?")
    if not (steps := read_steps(path)):
        raise ContractError(f"{path}: expected steps, found none")
    return steps


def summary(steps: list[dict], arm: str) -> Summary:
    """The summary of an arm's steps."""
    untrained = [step for step in steps if step["step"] == 0]
    trained = [step for step in steps if step["step"] > 0]
    return Summary(
        arm=arm,
        steps=len(trained),
        held_out=(_ends(_column(untrained, held_out))[0], _ends(_column(trained, held_out))[1]),
        reward=_ends(_column(trained, entry("reward"))),
        pass_rate=_ends(_column(trained, entry("pass_rate"))),
        mismatch_mean=_mean(_column(trained, entry(f"{MISMATCH}_mean"))),
        mismatch_max=_worst(_column(trained, entry(f"{MISMATCH}_max"))),
        bit_equal=_worst(_column(trained, entry("bit_equal")), min),
        ratio_deviation=_deviation(trained, "ratio"),
        rollout_ratio_deviation=_deviation(trained, "rollout_ratio"),
        clip_fraction=_worst(_column(trained, entry("first_minibatch_clip_fraction"))),
        seconds_generate=_median(_column(trained, seconds("generate"))),
        seconds_train=_median(_column(trained, seconds("score", "train"))),
        seconds_step=_median(_column(trained, seconds("step"))),
    )


def held_out(step: dict) -> float | None:
    """Pass rate on held-out problems after a step; None where it did not evaluate."""
    return step.get("eval", {}).get(_HELD_OUT)


def entry(name: str):
    """Reads an entry of a step."""
    return lambda step: step.get(name)


def seconds(*phases: str):
    """Reads the time of phases of a step, together; None where none is written."""

    def read(step):
        found = [step["seconds"][phase] for phase in phases if phase in step.get("seconds", {})]
        return sum(found) if found else None

    return read


def text(summaries: list[Summary]) -> str:
    """A Markdown table, one column for each arm."""
    rows = [("", *(s.arm for s in summaries)), ("---", *("---" for _ in summaries))]
    for label, cell in _ROWS:
        rows.append((label, *(cell(s) for s in summaries)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def share(value: float | None) -> str:
    """A percentage that says 100 only for the whole, and 0 only for nothing."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "not finite"
    if value in (0, 1):
        return f"{value * 100:.0f} %"
    return f"{min(max(value * 100, 0.01), 99.99):.2f} %"


def number(value: float | None, digits: int = 3) -> str:
    """``0`` only where it is exactly zero."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.{digits}g}"


#: Title, what of a step, whether to draw on a logarithmic axis that shows zero.
_PANELS = (
    ("|rollout logprob − trainer logprob|, largest, nats", entry(f"{MISMATCH}_max"), True),
    ("the same, mean, nats", entry(f"{MISMATCH}_mean"), True),
    ("share of tokens with equal bits", entry("bit_equal"), False),
    ("pass rate on held-out problems", held_out, False),
    ("mean reward", entry("reward"), False),
    ("pass rate", entry("pass_rate"), False),
    ("generation, s", seconds("generate"), False),
    ("scoring and training, s", seconds("score", "train"), False),
    ("weight sync, s", seconds("sync"), False),
    ("step, s", seconds("step"), False),
)


def picture(path: Path, arms: dict[str, list[dict]]) -> None:
    """One panel for each quantity that any arm wrote, the arms over each other."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [panel for panel in _PANELS if any(_column(steps, panel[1]) for steps in arms.values())]
    columns = 2
    rows = max(1, math.ceil(len(panels) / columns))
    figure, axes = pyplot.subplots(rows, columns, figsize=(11, 2.6 * rows), layout="constrained", squeeze=False)
    for axis, (title, read, logarithmic) in zip(axes.flat, panels):
        for arm, steps in arms.items():
            points = [(step["step"], read(step)) for step in steps]
            points = [point for point in points if _is_number(point[1]) and math.isfinite(point[1])]
            if points:
                axis.plot(*zip(*points), label=arm, color=_COLOURS.get(arm), marker=".")
        if logarithmic:
            axis.set_yscale("symlog", linthresh=1e-6)
            axis.set_ylim(bottom=-2e-7)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(frameon=False, fontsize=8)
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _change(pair) -> str:
    before, after = pair
    if before is None or after is None:
        return "-" if before is after else f"{share(before)} -> {share(after)}"
    return f"{share(before)} -> {share(after)} ({(after - before) * 100:+.1f} points)"


def _from_to(pair) -> str:
    return f"{number(pair[0])} -> {number(pair[1])}"


_ROWS = (
    ("steps", lambda s: str(s.steps)),
    ("held-out pass rate", lambda s: _change(s.held_out)),
    ("pass rate, first and last step", lambda s: _change(s.pass_rate)),
    ("mean reward, first and last step", lambda s: _from_to(s.reward)),
    ("mean difference of logprobs, nats", lambda s: number(s.mismatch_mean)),
    ("largest difference, nats", lambda s: number(s.mismatch_max)),
    ("tokens with equal bits, least of any step", lambda s: share(s.bit_equal)),
    ("importance ratio, first minibatch, largest distance from 1", lambda s: number(s.ratio_deviation)),
    ("the same, to the engine's probabilities", lambda s: number(s.rollout_ratio_deviation)),
    ("clip fraction, first minibatch, largest", lambda s: number(s.clip_fraction)),
    ("generation, s a step", lambda s: number(s.seconds_generate)),
    ("training, s a step", lambda s: number(s.seconds_train)),
    ("step, s", lambda s: number(s.seconds_step)),
)


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _column(steps: list[dict], read) -> list[float]:
    return [value for value in map(read, steps) if _is_number(value)]


def _ends(values: list[float]) -> tuple[float | None, float | None]:
    return (values[0], values[-1]) if values else (None, None)


def _deviation(steps: list[dict], ratio: str) -> float | None:
    """Largest distance from 1 of the extremes of a ratio on the first minibatch."""
    return _worst([abs(r - 1) for end in ("min", "max") for r in _column(steps, entry(f"first_minibatch_{ratio}_{end}"))])


def _worst(values: list[float], choose=max) -> float | None:
    """The largest (or what ``choose`` takes), NaN if there is one: a comparison would pass over it."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return choose(values, default=None)


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
