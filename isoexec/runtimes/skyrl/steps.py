"""One JSON line per step, numbers at full precision."""

from __future__ import annotations

import json
from pathlib import Path

from skyrl.train.utils.callbacks import TrainingCallback

from isoexec.runtimes.skyrl.lines import read_steps

#: Field of a line -> SkyRL's metric.
_FIELDS = {
    "reward": "sampled/reward",
    "pass_rate": "sampled/pass_rate",
    "responses": "sampled/responses",
    "sampled_batches": "sampled/batches",
    "weight_version": "sampled/weight_version",
    "rollout_train_logprobs_abs_diff_mean": "policy/rollout_train_logprobs_abs_diff_mean",
    "rollout_train_logprobs_abs_diff_max": "policy/rollout_train_logprobs_abs_diff_max",
    "rollout_train_logprobs_abs_diff_std": "policy/rollout_train_logprobs_abs_diff_std",
    "tokens": "policy/rollout_train_tokens",
    "bit_equal": "policy/rollout_train_bit_equal",
    "first_minibatch_ratio_min": "policy/first_minibatch/ratio_min",
    "first_minibatch_ratio_max": "policy/first_minibatch/ratio_max",
    "first_minibatch_rollout_ratio_min": "policy/first_minibatch/rollout_ratio_min",
    "first_minibatch_rollout_ratio_max": "policy/first_minibatch/rollout_ratio_max",
    "first_minibatch_clip_fraction": "policy/first_minibatch/clip_ratio",
    "loss": "policy/final_loss",
    "grad_norm": "policy/grad_norm",
    "entropy": "policy/policy_entropy",
}
_SECONDS = {"generate": "generate", "score": "fwd_logprobs_values_reward", "train": "train_critic_and_policy", "sync": "sync_weights"}
_SECONDS |= {"save": "save_checkpoints", "step": "step", "eval": "eval"}


class StepLog(TrainingCallback):
    """Appends a line per step to a file; an evaluation before training is line 0, with ``eval`` alone.

    A resumed run drops the lines of the steps that it takes again; a new one finds none, or drops them.

    Attributes:
        resumed: line of the checkpoint's step, without times, for a run that was stopped between the checkpoint and the line; or None.
    """

    def __init__(self, path: Path):
        self.path = path
        self.resumed: dict | None = None

    def on_train_start(self, trainer, callback_input, control) -> None:
        self.begin(callback_input.global_step)

    def begin(self, step: int) -> None:
        """Drop the lines after ``step``, all of them where it is 0, and write that of :attr:`resumed` if it is missing."""
        kept = [line for line in read_steps(self.path) if line["step"] <= step and step > 0]
        if self.resumed is not None and not any(line["step"] == self.resumed["step"] for line in kept):
            kept.append(self.resumed)
        self._write(kept)

    def complete(self, line: dict) -> None:
        """Add the line of a finished run's last step if it is missing; take nothing away."""
        lines = read_steps(self.path)
        if not any(known["step"] >= line["step"] for known in lines):
            self._write([*lines, line])

    def _write(self, lines: list[dict]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def on_log(self, trainer, callback_input, control) -> None:
        line = step_line(callback_input.global_step, callback_input.logs)
        if line["step"] > 0 and "seconds" not in line:  # a resumed run evaluates what the step before it has evaluated
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def step_line(step: int, logs: dict) -> dict:
    """The line of a step from what SkyRL logs for it."""
    evaluation = {name.removeprefix("eval/"): value for name, value in logs.items() if name.startswith("eval/")}
    seconds = {name: logs[f"timing/{timer}"] for name, timer in _SECONDS.items() if f"timing/{timer}" in logs}
    line = {"step": step} | {field: logs[metric] for field, metric in _FIELDS.items() if metric in logs}
    return line | ({"seconds": seconds} if seconds else {}) | ({"eval": evaluation} if evaluation else {})
