"""``isoexec train``: one arm in this process, or both, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from isoexec.contract import ContractError
from isoexec.train import report
from isoexec.train.progress import Watch
from isoexec.verify.folder import alone

#: Recipe of a command that names none.
DEFAULT = "tiny"
#: Exit status of a run that lost a process, or found no room for a checkpoint.
STOPPED = 4


def _quieten() -> None:
    """Tell libraries, before they are imported, to show warnings alone: what a run does from moment to moment is in its logs.

    ``LOG_LEVEL``, a variable of SkyRL's, shows it here too, and SkyRL's bars, of which one counts sampled batches against steps.
    """
    if "LOG_LEVEL" not in os.environ:
        quiet = {"LOG_LEVEL": "WARNING", "LOGURU_LEVEL": "WARNING", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
        os.environ.update(quiet)


def show(recipe: str, overrides: list[str]) -> None:
    """Print what a recipe and overrides compose to."""
    from isoexec.train.compose import as_yaml, compose

    print(as_yaml(compose(recipe, overrides)), end="")


def train(recipe: str, overrides: list[str]) -> int:
    """One run, in this process; prints its summary and writes it into the run's folder.

    Returns:
        0; 1 after a token whose bits differ; :data:`STOPPED` where a process was lost or a checkpoint could not be written.

    Raises:
        ContractError: bad input, which is found before anything starts; or what ended the run in one of its steps: rewards that cannot be
            trained on, no group whose rewards differ, a logprob that is not finite, two sides that need not compute the same bits.
    """
    _quieten()
    from isoexec.train.compose import compose

    composed = compose(recipe, overrides)
    from isoexec.runtimes.skyrl.resume import Finished  # a recipe that does not compose is refused before these imports are paid for
    from isoexec.train.check import prepare
    from isoexec.train.early import check_start

    out = Path(composed.isoexec.out)
    with alone(out, "isoexec.out"), tempfile.TemporaryDirectory() as scratch:
        drawn = Path(scratch) / "data"
        try:
            note = check_start(composed, drawn)
        except Finished as error:
            raise ContractError(str(error)) from None
        ready = prepare(composed, drawn)
        config = ready.config
        os.environ["TENSORBOARD_DIR"] = str((out / "tensorboard").resolve())
        if note is not None:
            print(f"isoexec: {note}", file=sys.stderr, flush=True)
        print(_beginning(ready), file=sys.stderr, flush=True)
        with Watch(out / "steps.jsonl", config.trainer.max_training_steps):
            status = _run(config, lambda: _keep(drawn, out / drawn.name))
        return status or _report(out, config.isoexec.arm)


def _keep(drawn: Path, folder: Path) -> None:
    """The problems of the run that begins, in place of those of the run before."""
    if drawn.exists():
        shutil.copytree(drawn, folder, dirs_exist_ok=True)


def _beginning(ready) -> str:
    """What is told before the first step, since that is a minute and more away where cores are few."""
    config, prompts = ready.config, sum(lengths.prompts for lengths in ready.lengths.values())
    return (
        f"isoexec: recipe {ready.recipe.name}, {config.isoexec.arm} arm, {config.trainer.max_training_steps} steps, into "
        f"{config.isoexec.out}; {prompts} prompts are checked; starting Ray, vLLM and Megatron (their log: {config.trainer.log_path})"
    )


def _report(out: Path, arm: str) -> int:
    text = report.text([report.summary(report.read(out / "steps.jsonl"), arm)])
    (out / "summary.md").write_text(text, encoding="utf-8")
    print(text, end="")
    print(f"{out / 'steps.jsonl'}; tensorboard --logdir {out / 'tensorboard'}")
    return 0


def _run(config, begin=lambda: None) -> int:
    from isoexec.runtimes.skyrl.config import ConfigError
    from isoexec.runtimes.skyrl.generator import RewardError
    from isoexec.runtimes.skyrl.mismatch import NotFinite, RolloutMismatch
    from isoexec.runtimes.skyrl.run import RunStopped
    from isoexec.runtimes.skyrl.run import train as run
    from isoexec.runtimes.skyrl.trainer import NothingToLearn

    try:
        run(config, begin)
    except RolloutMismatch as error:
        print(f"isoexec: {error}", file=sys.stderr)
        _trace(error.folder)
        return 1
    except RunStopped as error:
        print(f"isoexec: {error}", file=sys.stderr)
        return STOPPED
    except (ConfigError, NotFinite, NothingToLearn, RewardError) as error:
        raise ContractError(str(error)) from error
    return 0


def _trace(mismatch: Path) -> None:
    """Name the first different bit, once the run's processes are gone; where that fails, the mismatch is said all the same."""
    command = [sys.executable, "-m", "isoexec.cli", "trace", "run", "--mismatch", str(mismatch), "--out", str(mismatch)]
    if json.loads((mismatch / "mismatch.json").read_text(encoding="utf-8"))["captured"]:
        command += ["--cuda-graphs", "--level", "ops"]
    status = subprocess.run([*command, "--html", str(mismatch / "trace.html")], check=False, stdin=subprocess.DEVNULL).returncode
    if status not in (0, 1):
        print(f"isoexec: the mismatch was not traced (status {status}); by hand: {' '.join(command[1:])}", file=sys.stderr)


def compare(recipe: str, overrides: list[str]) -> int:
    """Both arms with one seed, one after the other: ``<out>.json`` and ``<out>.png`` beside the folder that holds their runs.

    Where it resumes, an arm that has taken all its steps is not run again.

    Returns:
        0, or the first exit status of an arm that is not.

    Raises:
        ContractError: what refuses either arm before it writes anything (:func:`isoexec.train.early.check_start`); nothing was started.
        KeyboardInterrupt: and the arm that ran has ended.
    """
    _quieten()
    from isoexec.runtimes.skyrl.config import ARMS
    from isoexec.train.compose import compose

    if chosen := [o for o in overrides if o.startswith("isoexec.arm=")]:
        raise ContractError(f"{chosen[0]}: a comparison runs both arms; leave it out")
    out = Path(compose(recipe, overrides).isoexec.out)
    words = {arm: [*overrides, f"isoexec.arm={arm}", f"isoexec.out={_quoted(out / arm)}"] for arm in ARMS}
    with tempfile.TemporaryDirectory() as scratch:  # both arms have one task and one seed
        finished = {arm: _is_finished(compose(recipe, words[arm]), Path(scratch)) for arm in ARMS}
    for arm in ARMS:
        print(f"== {arm}" + (": has taken all its steps" if finished[arm] else ""), file=sys.stderr, flush=True)
        if finished[arm]:
            continue
        status = _wait([sys.executable, "-m", "isoexec.cli", "train", recipe, *words[arm]])
        if status:
            print(f"the {arm} arm ended with status {status}; nothing is compared", file=sys.stderr)
            return status
    steps = {arm: report.read(out / arm / "steps.jsonl") for arm in ARMS}
    summaries = [report.summary(steps[arm], arm) for arm in ARMS]
    document = {"recipe": recipe, "overrides": overrides, "arms": {s.arm: s.as_dict() | {"steps": steps[s.arm]} for s in summaries}}
    numbers, picture = (out.with_name(f"{out.name}.{kind}") for kind in ("json", "png"))
    report.write_json(numbers, document)
    report.picture(picture, steps)
    print(report.text(summaries), end="")
    print(f"{numbers}, {picture}")
    return 0


def _is_finished(composed, folder: Path) -> bool:
    from isoexec.runtimes.skyrl.resume import Finished
    from isoexec.train.early import check_start

    try:
        check_start(composed, folder)
    except Finished:
        return True
    return False


def _wait(command: list[str]) -> int:
    """Exit status of a command; what asks this process to end is passed on to it, and its own end is waited for.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    # In a group of its own: Ctrl-C would reach it beside what is passed on, and interrupt its end.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    asked: list[int] = []

    def pass_on(number: int, _) -> None:
        asked.append(number)
        child.send_signal(number)

    heeded = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heeded}
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked and status:
        raise KeyboardInterrupt
    return status


def _quoted(path: Path) -> str:
    """A path as a value of Hydra's override grammar, in which backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(path))
    return f"'{escaped}'"
