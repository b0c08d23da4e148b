"""Looking in on running processes from outside."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

from isoexec.cli import main
from isoexec.contract import ContractError, ExecutionContract
from isoexec.runtimes import live

CONTRACT = ExecutionContract("Qwen3ForCausalLM", "cpu")
SCRIPT = """
import sys, torch
from isoexec.contract import ExecutionContract
from isoexec.runtimes import live
torch.set_num_threads(1)
torch.set_float32_matmul_precision(sys.argv[3])
live.publish(ExecutionContract.from_json(sys.argv[1]), sys.argv[2])
live.publish(ExecutionContract.from_json(sys.argv[1]), sys.argv[2])  # its next model
print("up", flush=True)
from isoexec.ops import norm
from isoexec.ops._core import registry
for line in sys.stdin:
    with registry.executing(line.strip()):
        norm.residual_add(*torch.zeros(2, 1, 2, dtype=torch.bfloat16))
    print("done", flush=True)
"""


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"isoexec-{os.getuid()}"


@pytest.fixture
def start():
    running = []

    def start(role, precision="highest", contract=CONTRACT):
        command = [sys.executable, "-c", SCRIPT, contract.to_json(), role, precision]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_live_processes_are_listed_and_compared(start, notes, capsys):
    assert main(["contract", "status", "--live"]) == 0
    engine, trainer = start("engine"), start("trainer")
    start("engine", "high", dataclasses.replace(CONTRACT, deployment=(("node", "2"),)))  # of another contract file, in the same bits
    capsys.readouterr()
    assert main(["contract", "status", "--live"]) == 1
    printed = capsys.readouterr().out
    assert f"{engine.pid}" in printed and "engine" in printed and "trainer" in printed
    assert 'numerical_policy.math.float32_matmul_precision: "highest" against "high"; leave torch' in printed
    engine.communicate("")
    trainer.kill(), trainer.wait()  # leaves its note behind
    assert len(list(notes.glob("*.json"))) == len(list(notes.glob("*.sock"))) == 2
    assert main(["contract", "status", "--live", "--json"]) == 0
    [left] = json.loads(capsys.readouterr().out)["processes"]
    assert left["identity"]["numerical_policy"]["math"]["float32_matmul_precision"] == "high" and len(list(notes.iterdir())) == 2


def test_counters_of_another_process_at_any_time(start, capsys):
    process = start("engine")

    def seen():
        assert main(["contract", "status", "--live", "--json"]) == 0
        [found] = json.loads(capsys.readouterr().out)["processes"]
        return {(op, case, implementation.rpartition(":")[2]): calls for op, case, implementation, calls in found["served"]}

    assert seen() == {}
    for calls in (1, 2):
        process.stdin.write("engine_decode\n"), process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        assert seen() == {("norm.residual_add", "engine_decode", "residual_add"): calls}
    assert main(["contract", "status", "--live"]) == 0 and "engine_decode 2" in capsys.readouterr().out


def test_a_process_that_does_not_answer(start, capsys, monkeypatch):
    """It is stopped; what it left is read all the same."""
    monkeypatch.setattr(live, "_ANSWER", 0.2)
    process = start("engine")
    process.send_signal(signal.SIGSTOP)
    try:
        assert main(["contract", "status", "--live"]) == 0
        printed = capsys.readouterr().out
        assert str(process.pid) in printed and "no answer" in printed
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_folder_that_others_write_to_is_refused(notes):
    notes.mkdir(mode=0o777)
    notes.chmod(0o777)
    with pytest.raises(ContractError, match="expected a folder of this user's alone"):
        live.processes()
    live.publish(CONTRACT, "engine")  # a run does not depend on it
    assert not list(notes.iterdir())


def test_a_note_that_is_none(notes):
    live.publish(CONTRACT, "engine")
    [note] = notes.glob("*.json")
    [process] = live.processes()
    assert process.pid == os.getpid() and process.identity.role == "engine"
    note.write_text('{"role": 1}')
    with pytest.raises(ContractError, match="remove it"):
        live.processes()
    live._unlink(note)
