"""A checkpoint whose files are damaged is refused by the name of the file, before anything starts and where a tensor is read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from isoexec.contract import ContractError
from isoexec.runtimes.megatron.hf_files import HFFiles
from isoexec.train.check import prepare
from isoexec.train.compose import RECIPES


def cut(path):
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])


@pytest.mark.parametrize("index", [False, True])
def test_reading_a_tensor_names_the_file(tmp_path, index):
    name = "b.safetensors" if index else "model.safetensors"
    save_file({"b": torch.ones(64)}, tmp_path / name)
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": name}}))
    files = HFFiles(tmp_path)
    assert files.tensor("b").sum() == 64
    cut(tmp_path / name)
    with pytest.raises(ContractError, match=f"checkpoint: .*/{name} cannot be read: .*; download or convert it again"):
        files.tensor("b")
    if not index:
        with pytest.raises(ContractError, match=f"{name} cannot be read"):
            HFFiles(tmp_path)


def test_a_run_on_a_damaged_checkpoint_does_not_start(composed, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(RECIPES / "start" / "dense", model)
    cut(model / "model.safetensors")
    config = composed("tiny-dense", f"trainer.policy.model.path={model}")
    config.isoexec.out = str(tmp_path / "out")
    with pytest.raises(ContractError, match="model.safetensors is not whole: expected .* bytes, found ") as error:
        prepare(config, tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
