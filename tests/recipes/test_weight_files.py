"""A checkpoint whose files are damaged is refused before anything starts, by the name of the file."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from isoexec.contract import ContractError
from isoexec.runtimes.megatron.hf_files import HFFiles
from isoexec.train.check import prepare
from isoexec.train.compose import RECIPES


@pytest.fixture
def sharded(tmp_path):
    """A folder whose two tensors lie in two files under an index."""
    for part in ("a", "b"):
        save_file({part: torch.ones(64)}, tmp_path / f"{part}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    return tmp_path


def cut(path, size=None):
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 1 if size is None else size])


def test_whole_files_pass(sharded):
    HFFiles(sharded).check()


@pytest.mark.parametrize("size", [None, 4, 0])
def test_a_file_that_ends_early_is_named(sharded, size):
    cut(sharded / "b.safetensors", size)
    with pytest.raises(ContractError, match="checkpoint: .*/b.safetensors cannot be read: .*; download or convert it again"):
        HFFiles(sharded).check()


def test_a_file_without_a_tensor_of_the_index_is_named(sharded):
    save_file({"c": torch.ones(64)}, sharded / "b.safetensors")
    with pytest.raises(ContractError, match="b.safetensors lacks 1 of the 1 tensors that its index names, first b"):
        HFFiles(sharded).check()


def test_reading_a_tensor_names_the_file_too(sharded):
    files = HFFiles(sharded)
    cut(sharded / "b.safetensors")
    with pytest.raises(ContractError, match="b.safetensors cannot be read"):
        files.tensor("b")


def test_a_run_on_a_damaged_checkpoint_does_not_start(composed, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(RECIPES / "start" / "dense", model)
    cut(model / "model.safetensors")
    config = composed("tiny-dense", f"trainer.policy.model.path={model}")
    config.isoexec.out = str(tmp_path / "out")
    with pytest.raises(ContractError, match="model.safetensors cannot be read") as error:
        prepare(config)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
