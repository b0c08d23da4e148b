"""A run that loses a process or its disk stops, says so, leaves nothing running, and can be resumed bit for bit."""

from __future__ import annotations

import os
import resource
import signal
import time

import pytest

from tests.skyrl.started import numbers

pytestmark = [
    pytest.mark.timeout(7200),
    pytest.mark.skipif(
        not os.environ.get("ISOEXEC_TEST_TRAINING"),
        reason="a minute or two of two cores for each loss, and again for each resumed run; ISOEXEC_TEST_TRAINING=1 runs it",
    ),
]


def stopped(run, *said: str) -> None:
    """The run ended by itself with a message, and left nothing."""
    status, text = run.end(), run.log.read_text(errors="replace")
    assert status not in (0, -signal.SIGKILL), run.text()
    last = text.strip().splitlines()[-1]
    assert "RunStopped" in last or "RunStopped" in text, run.text()
    for words in said:
        assert words in text, run.text()
    assert not run.left(), run.left(0)


def resume(start, run, whole) -> None:
    again = start(out=run.out)
    assert again.end() == 0, again.text()
    assert numbers(run.out) == numbers(whole)


@pytest.mark.parametrize("name", ["EngineCore", "ray::EngineActor", "ray::_PolicyActor"])
def test_a_killed_process_stops_the_run(start, whole, name):
    run = start()
    run.wait_for_step(1)
    os.kill(run.process(name), signal.SIGKILL)
    stopped(run, "global_step_", "is whole; start again with trainer.resume_mode=latest")
    resume(start, run, whole)


def test_a_full_disk_leaves_the_last_checkpoint(start, whole):
    run = start()
    run.wait_for_step(1)
    policy, checkpoint = run.process("ray::_PolicyActor"), run.out / "checkpoints/global_step_1/policy/rank-0.safetensors"
    # Weights on their way to the engine are less than half of what a checkpoint holds.
    resource.prlimit(policy, resource.RLIMIT_FSIZE, (checkpoint.stat().st_size // 2, resource.RLIM_INFINITY))
    stopped(run, "was not written", "make room for it", "is whole; start again with trainer.resume_mode=latest")
    assert not list((run.out / "checkpoints").glob(".*"))
    resume(start, run, whole)


@pytest.mark.parametrize("after", [0.0, 0.3, 0.6, 0.9, 1.2])  # seconds into the second step, which takes about one
def test_a_run_killed_at_any_point_of_a_step_is_resumed(start, whole, after):
    run = start()
    run.wait_for_step(1)
    time.sleep(after)
    run.driver.send_signal(signal.SIGKILL)
    run.end()
    assert not run.left(), run.left(0)
    resume(start, run, whole)
