"""Weight files that are not there, or not whole, are told from their headers."""

import json

import pytest
import torch
from safetensors.torch import save_file

from isoexec.contract import ContractError
from isoexec.contract.weights import check_weights

NAMES = {"a": "1.safetensors", "b": "2.safetensors"}


@pytest.fixture
def sharded(tmp_path):
    for name, file in NAMES.items():
        save_file({name: torch.ones(2)}, tmp_path / file)
    index(tmp_path, {"weight_map": NAMES})
    return tmp_path


def index(folder, value):
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


def test_whole_checkpoints_pass(sharded, tmp_path_factory):
    check_weights(sharded)
    single = tmp_path_factory.mktemp("single")
    save_file({"a": torch.ones(2)}, single / "model.safetensors")
    check_weights(single)


def test_a_missing_shard_is_named(sharded):
    (sharded / "2.safetensors").unlink()
    with pytest.raises(ContractError, match="names 2.safetensors, which is missing"):
        check_weights(sharded)


def test_a_cut_shard_is_named(sharded):
    file = sharded / "2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ContractError, match="2.safetensors is not whole"):
        check_weights(sharded)


def test_a_tensor_that_is_elsewhere_is_named(sharded):
    index(sharded, {"weight_map": NAMES | {"c": "1.safetensors"}})
    with pytest.raises(ContractError, match="1.safetensors: expected tensor c"):
        check_weights(sharded)


@pytest.mark.parametrize("value", [[], {}, {"weight_map": [1]}, {"weight_map": {"a": 1}}])
def test_an_index_that_is_none(sharded, value):
    index(sharded, value)
    with pytest.raises(ContractError, match="index.json cannot be read"):
        check_weights(sharded)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(ContractError, match="neither model.safetensors nor"):
        check_weights(tmp_path)
