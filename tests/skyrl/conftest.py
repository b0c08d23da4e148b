"""What the tests that train end to end share: a random model, and a run from start to end."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
from pathlib import Path

import pytest

#: A checkpoint at every step, so that a run can be resumed after any of them.
CHECKPOINTS = ("trainer.ckpt_interval=1", "trainer.resume_mode=latest")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a dense Qwen3 of two layers, beside whose weights lies what must not run: see :func:`trap`."""
    for package in ("ray", "skyrl", "vllm"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; run `make build`")
    from isoexec.verify.checkpoint import make_checkpoint

    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", num_hidden_layers=2)
    trap(folder)
    return folder


class _Opens:
    """Unpickled, it opens a file to append to it."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return os.open, (str(self._path), os.O_CREAT | os.O_WRONLY)


def trap(folder: Path) -> None:
    """Name remote code in a checkpoint, and put pickled weights into it. Whoever runs or loads one of them creates ``folder/ran``."""
    names = {"config.json": {"AutoConfig": "remote.Config", "AutoModelForCausalLM": "remote.Model"},
             "tokenizer_config.json": {"AutoTokenizer": ["remote.Tokenizer", None]}}  # fmt: skip
    for name, classes in names.items():
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": classes}))
    ran = folder / "ran"
    code = f"open({str(ran)!r}, 'a').close()\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    (folder / "remote.py").write_text(code)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Opens(ran)))


@pytest.fixture(scope="session")
def launch():
    """``launch(out, command, **environment)`` -> a started run; whatever is left of it at the end is killed."""
    from tests.skyrl.started import Run

    runs = []

    def launched(*args, **environment):
        runs.append(Run(*args, **environment))
        return runs[-1]

    yield launched
    for run in runs:
        run.kill_all()


@pytest.fixture(scope="session")
def start(model, launch, tmp_path_factory):
    """``start(*overrides, out=None, checkpoint=model, **environment)`` -> a started ``small_run.py``."""

    def started(*overrides, out=None, checkpoint=model, **environment):
        out = out or tmp_path_factory.mktemp("run")
        return launch(out, ["small_run.py", str(checkpoint), str(out), *CHECKPOINTS, *overrides], **environment)

    return started
