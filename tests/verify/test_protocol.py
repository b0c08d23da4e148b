"""Worker processes: every way to fail names the process and its log, and leaves no process behind."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from isoexec.verify.protocol import WorkerError, WorkerGroup, WorkerRefused, from_bits, to_bits
from isoexec.verify.run import worker_environment

HERE = str(Path(__file__).parent)


@pytest.fixture
def group(tmp_path):
    with WorkerGroup(tmp_path) as group:
        yield group


def odd(group, mode=None, name="odd"):
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return group.start(name, "odd_worker", {"PYTHONPATH": path, "ODD": mode})


@pytest.fixture
def worker(group):
    worker = odd(group)
    worker.started(60)
    return worker


def test_answers_and_counts_seconds(worker):
    assert worker.call("echo", 10, value={"a": [1, None, "é"]}) == {"a": [1, None, "é"]}
    assert set(worker.seconds) == {"start", "echo"}


def test_what_libraries_print_goes_to_the_log(worker):
    assert worker.call("print", 10) is None
    assert worker.call("echo", 10, value=1) == 1
    worker.stop()
    assert "noise on stdout" in worker.log.read_text()


def test_environment_is_laid_over_the_parents(group, monkeypatch):
    monkeypatch.setenv("ISOEXEC_CONTRACT", "/parent")
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
    worker = group.start("native", "odd_worker", {"PYTHONPATH": path, "ISOEXEC_CONTRACT": None})
    worker.started(60)
    assert worker.call("environment", 10, name="ISOEXEC_CONTRACT") is None


@pytest.mark.parametrize(
    "operation, arguments, text",
    [
        ("die", {}, r"died in 'die' \(exit status 9\)"),
        ("divide", {}, "'divide' failed: ZeroDivisionError"),
        ("raw", {"text": "garbage\n"}, "answered 'raw' with 'garbage.*not a line of the protocol"),
        ("raw", {"text": "[1, 2]\n"}, "not a line of the protocol"),
        ("nothing", {}, "'nothing' failed: KeyError"),
    ],
)
def test_a_failure_names_the_worker_and_its_log(worker, operation, arguments, text):
    with pytest.raises(WorkerError, match=rf"^odd: .*{text}.*log: .*odd\.log"):
        worker.call(operation, 10, **arguments)


def test_a_call_after_death_fails(worker):
    with pytest.raises(WorkerError):
        worker.call("die", 10)
    with pytest.raises(WorkerError, match="died"):
        worker.call("echo", 10, value=1)


def test_a_timeout_names_the_worker(worker):
    with pytest.raises(WorkerError, match=r"odd: no answer to 'sleep' within 0.2 s; log: "):
        worker.call("sleep", 0.2)


def test_a_refusal_is_told_from_a_crash(worker):
    with pytest.raises(WorkerRefused, match="expected 1, found 2"):
        worker.call("refuse", 10)
    assert worker.call("echo", 10, value=1) == 1  # the worker lives on


@pytest.mark.parametrize("mode, text", [("dies", "exit status 7"), ("fails", "no such framework")])
def test_a_worker_that_does_not_start(group, mode, text):
    with pytest.raises(WorkerError, match=f"'start'.*{text}"):
        odd(group, mode).started(60)


@pytest.fixture
def ranks(group):
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return group.start_ranks(2, "odd", "odd_worker", {"PYTHONPATH": path})


def test_ranks_make_every_call_and_give_one_answer(ranks):
    assert ranks.call("echo", 60, value=3) == 3
    assert ranks.call("environment", 10, name="WORLD_SIZE") == "2"
    assert ranks.call("environment", 10, name="MASTER_PORT").isdecimal()
    with pytest.raises(WorkerError, match="odd-1: answers 'environment' otherwise than odd-0; logs: "):
        ranks.call("environment", 10, name="RANK")


def test_a_rank_that_fails_is_not_waited_out(ranks):
    """The others may wait for it for ever."""
    with pytest.raises(WorkerRefused, match="odd-1: .*expected 1, found 2"):
        ranks.call("refuse_on", 60, rank="1")


def test_one_rank_is_a_worker_also_in_a_job_of_many(group, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
    alone = group.start_ranks(1, "odd", "odd_worker", worker_environment(None) | {"PYTHONPATH": path})
    assert alone.name == "odd" and alone.call("environment", 60, name="WORLD_SIZE") is None


def test_the_first_failure_ends_all(group):
    first, second = odd(group, name="first"), odd(group, name="second")
    for worker in (first, second):
        worker.started(60)
    threading.Timer(0.2, lambda: group.fail(WorkerError("first: died"))).start()
    with pytest.raises(WorkerError, match="second: died in 'sleep'"):
        second.call("sleep", 30)
    assert str(group.error) == "first: died"
    with pytest.raises(WorkerError, match="not started"):
        odd(group, name="third")


def test_stop_ends_grandchildren(worker):
    child = worker.call("child", 10)
    worker.stop()
    deadline = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < deadline, f"process {child} outlived its worker"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_bits_are_exact_and_inexact_values_are_refused():
    values = [0.0, -0.0, -1.5, 2.0**-149, -3.4028234663852886e38, float("-inf")]
    assert [str(v) for v in from_bits(to_bits(values))] == [str(v) for v in values]
    assert to_bits([0.0]) != to_bits([-0.0])
    assert from_bits(to_bits([float("nan")]))[0] != 0
    with pytest.raises(ValueError, match="not an fp32 value"):
        to_bits([0.1])


def test_sigterm_ends_the_workers_of_a_group(tmp_path):
    """In the block SIGTERM is an interrupt, which leaves it; after the block it is what it was."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), WorkerGroup(tmp_path) as group:
        worker = odd(group)
        worker.started(60)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is before
    assert worker._process.poll() is not None
