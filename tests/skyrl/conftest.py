"""What the tests that train end to end share: a random model, and a run from start to end."""

from __future__ import annotations

import importlib.util

import pytest

#: A checkpoint at every step, so that a run can be resumed after any of them.
CHECKPOINTS = ("trainer.ckpt_interval=1", "trainer.resume_mode=latest")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a dense Qwen3 of two layers."""
    for package in ("ray", "skyrl", "vllm"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; run `make build`")
    from isoexec.verify.checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="session")
def start(model, tmp_path_factory):
    """``start(*overrides, out=None)`` -> a started run; whatever is left of it at the end is killed."""
    from tests.skyrl.started import Run

    runs = []

    def started(*overrides, out=None):
        runs.append(Run(model, out or tmp_path_factory.mktemp("run"), *CHECKPOINTS, *overrides))
        return runs[-1]

    yield started
    for run in runs:
        run.kill_all()


@pytest.fixture(scope="session")
def whole(start):
    """Folder of a run from start to end."""
    run = start()
    assert run.end() == 0, run.text()
    assert not run.left(), run.left(0)
    return run.out
