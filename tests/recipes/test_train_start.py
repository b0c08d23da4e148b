"""What refuses a run before it writes anything, and what a stopped comparison goes on with."""

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest

from isoexec.contract import ContractError
from isoexec.runtimes.skyrl import address, resume
from isoexec.runtimes.skyrl.config import ConfigError, TrainConfig
from isoexec.runtimes.skyrl.lines import read_steps
from isoexec.train import launch, tasks
from isoexec.train.check import prepare
from isoexec.train.compose import RECIPES
from isoexec.train.early import _resolved, check_start

SMALL = ("recipe.task.train=64", "recipe.task.held_out=8", "trainer.max_training_steps=2")


def content(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != ".lock"}


@pytest.fixture
def run(composed, tmp_path):
    """``run(*overrides, arm="isoexec")``: composed configuration of a run whose folder holds a checkpoint of its first step."""

    def compose(*overrides, arm="isoexec"):
        return composed("tiny-dense", *SMALL, f"isoexec.arm={arm}", f"isoexec.out={tmp_path / 'out' / arm}", *overrides)

    from isoexec.runtimes.skyrl.run import contract_of

    def save(arm="isoexec", step=1):
        config = _resolved(compose(arm=arm), tmp_path / "drawn")
        contract = contract_of(config)
        state = {
            "step": step,
            "recipe": resume.identity(config, None if contract is None else contract.digest),
            "stream": {"taken": 1},
            "line": {"step": step},
        }
        folder = tmp_path / "out" / arm / f"checkpoints/global_step_{step}"
        folder.mkdir(parents=True)
        (folder / "trainer.json").write_text(json.dumps(state))
        (folder.parent / "latest_ckpt_global_step.txt").write_text(str(step))
        (tmp_path / "out" / arm / "data").mkdir()
        (tmp_path / "out" / arm / "data/train.jsonl").write_text("drawn\n")
        (tmp_path / "out" / arm / "steps.jsonl").write_text('{"step": 0}\n')

    compose.save = save
    return compose


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["isoexec.ray_address=127.0.0.1:1"], {}, "isoexec.ray_address: nothing answers at '127.0.0.1:1'"),
        ([], {"ISOEXEC_CONTRACT": "x"}, "ISOEXEC_CONTRACT: expected unset"),
        (["trainer.resume_mode=from_path", "trainer.resume_path=nowhere"], {}, "trainer.resume_path: expected a global_step_ folder"),
        (["trainer.resume_mode=latest", "isoexec.seed=5"], {}, "isoexec.seed: expected 0, found 5"),
        (["trainer.resume_mode=latest", "trainer.max_training_steps=1"], {}, "there is nothing left to do"),
        (["trainer.max_prompt_length=4"], {}, "64 of 64 prompts have more than trainer.max_prompt_length = 4 tokens"),
        (["+isoexec.environments.mine=nowhere:Environment"], {}, "isoexec.environments.mine: 'nowhere:Environment'"),
    ],
)
def test_a_refused_start_leaves_the_run_before_it_as_it_was(run, tmp_path, monkeypatch, words, variables, message):
    run.save()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "out/isoexec"
    (out / "steps.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    before = content(out)
    began = time.monotonic()
    with pytest.raises(ContractError, match=message):
        launch.train("tiny-dense", [*SMALL, f"isoexec.out={out}", *words])
    assert content(out) == before and time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("recipe.task.config.max_digits=2", "training data"),
        ("recipe.task.train=65", "training data"),
        ("trainer.policy.optimizer_config.lr=1e-5", "trainer.policy.optimizer_config.lr"),
        ("trainer.train_batch_size=16", "trainer.train_batch_size"),
        ("model=tiny-hybrid-moe", "model (its config.json)"),
    ],
)
def test_another_recipe_is_refused(run, tmp_path, override, named):
    run.save("native")
    with pytest.raises(ContractError) as refused:
        check_start(run("trainer.resume_mode=latest", override, arm="native"), tmp_path / "again")
    assert f"{named}: expected " in str(refused.value) and "is of another run" in str(refused.value)


def test_the_same_recipe_is_not(run, tmp_path):
    run.save()
    longer = run("trainer.resume_mode=latest", "trainer.max_training_steps=3", "trainer.ckpt_interval=1")
    assert check_start(longer, tmp_path / "again") is None
    assert "no checkpoint in" in check_start(run("trainer.resume_mode=latest", arm="native"), tmp_path / "again")
    assert check_start(run(arm="native"), tmp_path / "again") is None


def test_a_run_draws_its_problems_once_and_keeps_them_when_it_begins(run, tmp_path, monkeypatch):
    run.save()
    out, draws, begun = tmp_path / "out/isoexec", [], []
    split = tasks.split
    monkeypatch.setattr(tasks, "split", lambda *arguments: draws.append(None) or split(*arguments))

    def start(config, begin):
        assert (out / "data/train.jsonl").read_text() == "drawn\n"  # a cluster may still refuse
        begun.append([open(file).read() for file in (*config.data.train_data, *config.data.val_data)])
        begin()
        return launch.STOPPED

    monkeypatch.setattr(launch, "_run", start)
    words = [*SMALL, f"isoexec.out={out}", "trainer.resume_mode=latest"]
    assert launch.train("tiny-dense", words) == launch.STOPPED
    assert len(draws) == 1 and [[(out / f"data/{name}.jsonl").read_text() for name in ("train", "held_out")]] == begun


def test_what_is_not_known_to_move_no_bit_is_part_of_a_run():
    plain = dataclasses.asdict(TrainConfig())
    known = resume._moving(plain)
    assert {"isoexec.seed", "trainer.algorithm.eps_clip_low", "generator.sampling_params.temperature"} <= known.keys()
    plain["trainer"]["policy"]["new"] = plain["generator"]["inference_engine"]["new"] = plain["new"] = 1
    assert resume._moving(plain).keys() - known.keys() == {"trainer.policy.new", "generator.inference_engine.new", "new"}


def test_what_moves_no_bit_is_there():
    """A name that SkyRL changes would let nothing through, and its successor would refuse a run for nothing."""
    for path in resume._MOVE_NONE:
        part = dataclasses.asdict(TrainConfig())
        for name in path.split("."):
            part = part[name]


def test_a_comparison_goes_on_with_the_arm_that_has_not_ended(run, tmp_path, monkeypatch, capsys):
    run.save("isoexec", step=2)
    started = []

    def wait(command):
        started.append(command)
        (tmp_path / "out/native").mkdir()
        (tmp_path / "out/native/steps.jsonl").write_text('{"step": 2, "reward": 1.0}\n')
        return 0

    monkeypatch.setattr(launch, "_wait", wait)
    words = [*SMALL, f"isoexec.out={tmp_path / 'out'}", "trainer.resume_mode=latest"]
    assert launch.compare("tiny-dense", words) == 0
    assert len(started) == 1 and "isoexec.arm=native" in started[0]
    assert "== isoexec: has taken all its steps" in capsys.readouterr().err
    assert [line["step"] for line in read_steps(tmp_path / "out/isoexec/steps.jsonl")] == [0, 2]  # that of its checkpoint was missing
    assert set(json.loads((tmp_path / "out.json").read_text())["arms"]) == {"isoexec", "native"}
    with pytest.raises(ContractError, match="is of another run"):
        launch.compare("tiny-dense", [*words, "trainer.train_batch_size=16"])
    assert len(started) == 1


CHILD = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "begun").touch()
    time.sleep(60)
finally:
    time.sleep(1)
    (folder / "ended").touch()
"""
PARENT = """
import signal, sys
from isoexec.train.launch import _wait
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background commands ignore it, and these tests may be one
_wait([sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize("everyone", [True, False])
def test_an_interrupted_comparison_waits_for_the_end_of_its_arm(tmp_path, everyone):
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "child.py"), str(tmp_path)]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    while not (tmp_path / "begun").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    (os.killpg if everyone else os.kill)(parent.pid, signal.SIGINT)  # Ctrl-C reaches the terminal's foreground group
    _, said = parent.communicate(timeout=30)
    assert b"KeyboardInterrupt" in said and (tmp_path / "ended").exists()


def test_a_cluster_to_join_answers_or_is_named(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        here = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(address, "_recorded", lambda: here)
        monkeypatch.setattr(address, "_refusal", lambda found: None)
        assert address.answering(here) == address.answering("auto") == here
    with pytest.raises(ConfigError, match=r"nothing answers at .* \(auto: what `ray start` recorded"):
        address.answering("auto")
    monkeypatch.setattr(address, "_recorded", lambda: None)
    with pytest.raises(ConfigError, match="auto: expected RAY_ADDRESS, or a cluster"):  # another run's private one is not looked for
        address.answering("auto")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="nothing answers at '127.0.0.1:1' .auto: RAY_ADDRESS"):
        address.answering("auto")
    for bad in ("local", "ray://a:1", "host", ":6379", "host:0", "host:99999"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            address.answering(bad)


@pytest.fixture
def head():
    """Address of a cluster's head."""
    from isoexec.runtimes.skyrl.node import LocalNode

    node = LocalNode("127.0.0.1", gpus=0, cpus=1, object_store=80 << 20)
    yield node.address
    node.stop()


def test_what_is_no_cluster_s_head_is_named_in_seconds(head, monkeypatch):
    assert address.answering(head) == head
    monkeypatch.setattr(address, "_PATIENCE", 0.5)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        began = time.monotonic()
        with pytest.raises(ConfigError, match="does not answer as the head of a Ray cluster: DEADLINE_EXCEEDED.*ray start --head"):
            address.answering(f"127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - began < 10


def test_the_task_in_the_documentation_is_one_that_can_be_drawn(composed, tmp_path):
    text = (RECIPES.parent / "docs/training.md").read_text()
    [command] = [block for block in text.split("```") if "generator=gcd" in block and "max_value" in block]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["isoexec", "train", "tiny"]
    ready = prepare(composed("tiny", *words[3:], f"isoexec.out={tmp_path}"), tmp_path)
    assert [lengths.prompts for lengths in ready.lengths.values()] == [256, 64]
