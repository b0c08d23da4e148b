"""One checkpoint and one trainer per module: importing megatron-core and building the model cost more than the tests."""

from __future__ import annotations

import random

import pytest

from isoexec.contract import CONTRACT_VARIABLE
from isoexec.contract.build import contract_for_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    from isoexec.verify.checkpoint import make_checkpoint

    return str(make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3"))


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    from isoexec.verify.checkpoint import make_checkpoint

    return str(make_checkpoint(tmp_path_factory.mktemp("model") / "tied", num_hidden_layers=2, tie_word_embeddings=True))


@pytest.fixture(scope="session")
def contract_file(model_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("contract") / "contract.json"
    path.write_text(contract_for_model(model_folder, "cpu").to_json())
    return str(path)


@pytest.fixture(scope="module")
def under_contract(contract_file):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONTRACT_VARIABLE, contract_file)
        yield


@pytest.fixture(scope="module")
def without_contract():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(CONTRACT_VARIABLE, raising=False)
        yield


@pytest.fixture(scope="session")
def sequences():
    """(prompt, generated) pairs whose boundaries fall before, on and after attention blocks of 64 keys."""
    draw = random.Random(0)
    lengths = [(1, 20), (5, 7), (63, 2), (64, 4), (65, 1), (130, 9)]
    return [tuple([draw.randrange(512) for _ in range(n)] for n in pair) for pair in lengths]
