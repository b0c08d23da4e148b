"""A run's checkpoints: whole or not there, and of this run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from isoexec.runtimes.skyrl import resume
from isoexec.runtimes.skyrl.aside import set_aside
from isoexec.runtimes.skyrl.client import InferenceClient
from isoexec.runtimes.skyrl.config import ConfigError, resolve
from isoexec.runtimes.skyrl.steps import read_steps
from isoexec.runtimes.skyrl.stream import PromptStream
from tests.skyrl.prompts import Prompts
from tests.skyrl.small_run import small_config


class Disk:
    """Saves one file for the policy, as the policy workers do; or fails half-way, as they do on a full disk."""

    def __init__(self):
        self.full = False

    def save_checkpoint(self, role, folder):
        from pathlib import Path

        Path(folder).mkdir(parents=True)
        (Path(folder) / "rank-0.safetensors").write_bytes(b"half")
        if self.full:
            raise OSError(28, "No space left on device")
        (Path(folder) / "rank-0.json").write_text("{}")

    def load_checkpoint(self, role, folder):
        self.loaded = folder


RECIPE = {"isoexec.seed": 1, "contract": "digest", "trainer.policy.optimizer_config.lr": 1e-3}


@pytest.fixture
def saving(tmp_path):
    """``saving(step=0, mode="latest", path=None, **recipe)`` -> a trainer that saves to and loads from a disk."""
    from isoexec.runtimes.skyrl.steps import StepLog
    from isoexec.runtimes.skyrl.trainer import Trainer

    disk = Disk()

    def trainer(step=0, mode="latest", path=None, keep=2, **recipe):
        made = Trainer.__new__(Trainer)
        made._recipe = RECIPE | recipe
        made.global_step, made.dispatch, made.all_metrics = step, disk, {"sampled/reward": 1 / 3}
        made._steps = StepLog(tmp_path / "steps.jsonl")
        made.train_dataloader = PromptStream(Prompts(8), 2, seed=1)
        made.train_dataloader.taken = 3 * step
        made.inference_engine_client = InferenceClient(proxy_url="", server_urls=[], data_parallel_size=1)
        made.cfg = SimpleNamespace(
            isoexec=SimpleNamespace(out=str(tmp_path)),
            trainer=SimpleNamespace(
                ckpt_path=str(tmp_path), max_ckpts_to_keep=keep, max_training_steps=30, resume_mode=mode, resume_path=path
            ),
        )
        return made

    trainer.disk = disk
    return trainer


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_checkpoint_is_whole_or_not_there(saving, tmp_path):
    from isoexec.runtimes.skyrl.trainer import CheckpointNotWritten

    assert saving().load_checkpoints() == (0, None)
    for step in (1, 2, 3):
        saving(step).save_checkpoints()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_2", "global_step_3", "latest_ckpt_global_step.txt"]
    saving.disk.full = True
    with pytest.raises(CheckpointNotWritten, match="global_step_4 was not written.*No space left.*make room"):
        saving(4).save_checkpoints()
    assert not list(tmp_path.glob(".*"))
    assert saving().last_checkpoint() == tmp_path / "global_step_3"
    resumed = saving()
    assert resumed.load_checkpoints() == (3, str(tmp_path / "global_step_3"))
    assert resumed._steps.resumed == {"step": 3, "reward": 1 / 3}
    assert resumed.inference_engine_client.weight_version == 3  # counts on from the run that it continues
    assert resumed.train_dataloader.taken == 9 and saving.disk.loaded == str(tmp_path / "global_step_3/policy")
    saving.disk.full = False
    (tmp_path / ".global_step_4.partial").mkdir()  # what a killed run leaves
    saving(4).save_checkpoints()
    assert not list(tmp_path.glob(".*")) and saving().load_checkpoints()[0] == 4


def begins(trainer):
    """What a run does with the folder when nothing refuses it any more."""
    set_aside(trainer.cfg, resume.judge(trainer.cfg.trainer, trainer._recipe))
    return trainer


def test_a_new_run_finds_nothing_of_an_older_one_and_loses_nothing_of_it(saving, tmp_path):
    begins(saving(mode="none"))
    assert not list(tmp_path.iterdir())
    for step in (8, 9):
        saving(step).save_checkpoints()
    for name in ("tensorboard", "mismatch-9"):
        (tmp_path / name).mkdir()
    (tmp_path / "tensorboard/events").write_text("old")
    (tmp_path / "steps.jsonl").write_text('{"step": 9}\n')
    (tmp_path / "summary.md").write_text("old")
    begins(saving(mode="none"))
    kept = ["global_step_8", "global_step_9", "latest_ckpt_global_step.txt", "mismatch-9", "steps.jsonl", "summary.md", "tensorboard"]
    assert names(tmp_path) == ["previous"] and names(tmp_path / "previous") == kept
    (tmp_path / "tensorboard").mkdir()  # of a start that came to no step: not worth what was set aside
    begins(saving(mode="latest"))
    assert names(tmp_path) == ["previous"] and names(tmp_path / "previous") == kept
    for step in (1, 2, 3):
        saving(step).save_checkpoints()
    assert saving().load_checkpoints()[0] == 3 and not (tmp_path / "global_step_1").exists()
    begins(saving(mode="none"))
    assert names(tmp_path / "previous") == ["global_step_2", "global_step_3", "latest_ckpt_global_step.txt"]


def test_resuming_before_the_last_checkpoint_sets_the_later_ones_aside(saving, tmp_path):
    for step in (10, 20):
        saving(step).save_checkpoints()
    (tmp_path / "steps.jsonl").write_text('{"step": 10}\n{"step": 20}\n')
    resumed = begins(saving(mode="from_path", path=str(tmp_path / "global_step_10")))
    assert saving().last_checkpoint() == tmp_path / "global_step_10" and names(tmp_path / "previous") == ["global_step_20", "steps.jsonl"]
    assert resumed.load_checkpoints()[0] == 10
    saving(11, keep=1).save_checkpoints()
    assert saving().load_checkpoints()[0] == 11
    (tmp_path / "steps.jsonl").unlink()
    begins(saving(mode="from_path", path=str(tmp_path / "previous/global_step_20")))  # what is resumed stays where it is
    assert names(tmp_path) == ["previous", "previous-2"] and (tmp_path / "previous/global_step_20/trainer.json").exists()
    assert names(tmp_path / "previous-2") == ["global_step_11", "latest_ckpt_global_step.txt"]


def test_a_checkpoint_of_another_run_is_refused(saving, tmp_path):
    saving(2).save_checkpoints()
    different = {"isoexec.seed": 5, "contract": None, "trainer.policy.optimizer_config.lr": 1e-4, "new": 1}
    with pytest.raises(ConfigError) as refused:
        saving(**different).load_checkpoints()
    assert (
        "is of another run: contract: expected 'digest', found None; isoexec.seed: expected 1, found 5; new: expected 'nothing', found 1; "
        "trainer.policy.optimizer_config.lr: expected 0.001, found 0.0001; resume with what is expected"
    ) in str(refused.value)
    for path in ("/nowhere/global_step_1", str(tmp_path), None):
        with pytest.raises(ConfigError, match="resume_path: expected a global_step_ folder"):
            saving(mode="from_path", path=path).load_checkpoints()
    with pytest.raises(ConfigError, match="resume_mode.*'newest'"):
        saving(mode="newest").load_checkpoints()
    assert saving(mode="from_path", path=str(tmp_path / "global_step_2")).load_checkpoints()[0] == 2
    assert saving(mode="none").load_checkpoints() == saving(mode=None).load_checkpoints() == (0, None)
    finished = saving()
    finished.cfg.trainer.max_training_steps = 2
    with pytest.raises(resume.Finished, match="max_training_steps: expected more than the checkpoint's 2") as done:
        finished.load_checkpoints()
    assert done.value.line == {"step": 2, "reward": 1 / 3}
    finished._steps.complete(done.value.line)  # it was stopped before that line was written
    finished._steps.complete({"step": 1})
    assert read_steps(finished._steps.path) == [{"step": 2, "reward": 1 / 3}]
    file = tmp_path / "global_step_2/trainer.json"
    old = json.loads(file.read_text())
    del old["recipe"]
    for content, message in (("{", "global_step_2"), ("{}", "expected step and stream"), (json.dumps(old), "does not say of what run")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            saving().load_checkpoints()
    (tmp_path / "latest_ckpt_global_step.txt").write_text("two")
    with pytest.raises(ConfigError, match="latest_ckpt_global_step.txt: expected the step"):
        saving().load_checkpoints()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.policy.optimizer_config.lr=1e-5", "trainer.policy.optimizer_config.lr"),
        ("trainer.algorithm.eps_clip_high=0.3", "trainer.algorithm.eps_clip_high"),
        ("trainer.policy_mini_batch_size=4", "trainer.policy_mini_batch_size"),
        ("generator.n_samples_per_prompt=2", "generator.n_samples_per_prompt"),
        ("isoexec.arm=native", "isoexec.arm"),
        ("trainer.max_training_steps=9", None),
        ("trainer.ckpt_interval=5", None),
        ("trainer.logger=tensorboard", None),
        ("trainer.eval_interval=2", None),
        ("isoexec.on_mismatch=warn", None),
    ],
)
def test_what_decides_the_bits_of_a_run_is_in_its_identity(tmp_path, override, named):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["A"], "hidden_size": 8}')

    def identity(*overrides):
        return resume.identity(resolve(small_config(model, tmp_path / "out", list(overrides))), "digest")

    first, other = identity(), identity(override)
    different = [name for name in first | other if first.get(name) != other.get(name)]
    assert named in different if named else different == []
    assert json.loads(json.dumps(first)) == first


def test_data_model_and_tokenizer_are_in_it_wherever_they_lie(tmp_path):
    def identity(folder, size=8, text="say"):
        model = tmp_path / folder
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"architectures": ["A"], "hidden_size": size}))
        (model / "tokenizer.json").write_text(text)
        config = resolve(small_config(model, model / "out"))
        if text == "tell":
            data = model / "out/prompts.jsonl"
            data.write_text(data.read_text().replace("say", "tell"))
        return resume.identity(config, None)

    first = identity("a")
    assert identity("b") == first
    assert [name for name, value in identity("c", size=9).items() if value != first[name]] == ["model (its config.json)"]
    other = identity("d", text="tell")
    assert [name for name, value in other.items() if value != first[name]] == ["model (its tokenizer)", "training data"]
