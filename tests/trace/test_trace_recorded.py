"""`isoexec trace run --mismatch`: a training run's differing sequence, on the weights that both sides had."""

import json
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from isoexec.cli import main
from isoexec.contract import ContractError, contract_for_model
from isoexec.verify.checkpoint import make_checkpoint
from isoexec.verify.plant import plant_ulp
from isoexec.verify.trace import session

TOKENS = [5, 9, 300, 7, 12, 44, 208, 3]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run leaves behind whose policy missed one ulp of the engine's weights, and the name of the weight."""
    work = tmp_path_factory.mktemp("recorded")
    folder, model = work / "mismatch-4", work / "model"
    folder.mkdir()
    make_checkpoint(model, num_hidden_layers=1)
    weight = plant_ulp(model, work / "planted")
    shutil.copytree(work / "planted", folder / "trainer")
    save_file(load_file(model / "model.safetensors"), folder / "engine.safetensors")
    (folder / "contract.json").write_text(contract_for_model(model, "cpu").to_json())
    found = {"step": 4, "weight_version": 3, "sequence": 6, "temperature": 0.7, "seed": 11, "tokens": TOKENS, "prompt_tokens": 3}
    found |= {"engine_slept": False, "captured": False}
    (folder / "mismatch.json").write_text(json.dumps(found))
    return folder, weight


@pytest.fixture
def recorded(whole, tmp_path):
    """A copy of it."""
    return shutil.copytree(whole[0], tmp_path / "mismatch-4"), whole[1]


def test_the_weight_that_one_side_missed_is_named(recorded, tmp_path, monkeypatch, capsys):
    folder, weight = recorded
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "run", "--mismatch", str(folder), "--html", "trace.html"]) == 1
    told = capsys.readouterr().out
    assert "DIVERGENT: different weights" in told and "layer 0" in told
    assert f"tensors of the checkpoint that differ: {weight}" in told
    assert "the engine sampled other tokens this time" in told  # those above were not sampled
    assert (tmp_path / "trace.html").exists() and (tmp_path / "out/trace.zip").exists()


@pytest.mark.parametrize("lost", ["mismatch.json", "contract.json", "engine.safetensors", "trainer"])
def test_a_folder_that_is_not_whole_is_one_line(recorded, tmp_path, monkeypatch, capsys, lost):
    folder, _ = recorded
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(folder / lost) if lost == "trainer" else (folder / lost).unlink()
    assert main(["trace", "run", "--mismatch", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "expected a run's mismatch-<step>" in error and len(error.splitlines()) == 1


def test_an_engine_that_slept_runs_on_the_trainer_s_weights_and_that_is_said(recorded, tmp_path):
    folder, _ = recorded
    found = json.loads((folder / "mismatch.json").read_text())
    own = session._recorded_batch(folder, tmp_path / "awake")
    assert own.model == tmp_path / "awake/engine" and not own.engine_slept
    (folder / "mismatch.json").write_text(json.dumps(found | {"engine_slept": True}))
    (folder / "engine.safetensors").unlink()
    slept = session._recorded_batch(folder, tmp_path / "slept")
    assert slept.model == slept.trainer_model == folder.resolve() / "trainer" and slept.engine_slept

    def notes(verdict, other_tokens):
        state = SimpleNamespace(engine_slept=True, repeats=True, other_tokens=other_tokens, captured=False)
        return session._notes(SimpleNamespace(verdict=verdict), state)

    assert [len(notes("divergent", False)), len(notes("identical", False)), len(notes("identical", True))] == [1, 2, 2]
    assert all("it ran on the trainer's weights here" in notes(verdict, False)[0] for verdict in ("divergent", "identical"))
    shutil.rmtree(folder / "trainer")
    with pytest.raises(ContractError, match="expected a run's mismatch-<step>"):
        session._recorded_batch(folder, tmp_path / "lost")


@pytest.mark.parametrize(("captures", "said"), [(False, 1), (True, 0)])
def test_a_trace_of_eager_steps_says_that_the_run_s_were_captured(recorded, tmp_path, captures, said):
    folder, _ = recorded
    found = json.loads((folder / "mismatch.json").read_text())
    (folder / "mismatch.json").write_text(json.dumps(found | {"captured": True}))
    assert session._recorded_batch(folder, tmp_path).captured
    state = SimpleNamespace(engine_slept=False, repeats=True, other_tokens=False, captured=True, captures=captures)
    notes = session._notes(SimpleNamespace(verdict="divergent"), state)
    assert len(notes) == said and all("--cuda-graphs --level ops" in note for note in notes)
