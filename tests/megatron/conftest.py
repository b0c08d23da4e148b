"""One checkpoint and one trainer per module: importing megatron-core and building the model cost more than the tests."""

from __future__ import annotations

import dataclasses
import random

import pytest

from isoexec.contract import CONTRACT_VARIABLE, Claims
from isoexec.contract.build import contract_for_model

pytest.register_assert_rewrite("same_scores")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    from isoexec.verify.checkpoint import make_checkpoint

    return str(make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3"))


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    from isoexec.verify.checkpoint import make_checkpoint

    return str(make_checkpoint(tmp_path_factory.mktemp("model") / "tied", num_hidden_layers=2, tie_word_embeddings=True))


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory):
    """architecture -> (checkpoint of two layers, contract that claims every layout of two ranks); each is made once."""
    from isoexec.verify.checkpoint import make_checkpoint

    made = {}

    def get(architecture: str) -> tuple[str, str]:
        if architecture not in made:
            folder = tmp_path_factory.mktemp("model") / architecture
            kinds = {"layer_types": ["linear_attention", "full_attention"]} if "3_5" in architecture else {}
            make_checkpoint(folder, architecture, num_hidden_layers=2, **kinds)
            contract = contract_for_model(folder, "cpu")
            claims = Claims(trainer_tp=2, trainer_pp=2, trainer_ep=2, trainer_sp=True)
            file = tmp_path_factory.mktemp("contract") / f"{architecture}.json"
            file.write_text(dataclasses.replace(contract, claims=claims).to_json())
            made[architecture] = str(folder), str(file)
        return made[architecture]

    return get


@pytest.fixture(scope="session")
def contract_file(model_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("contract") / "contract.json"
    path.write_text(contract_for_model(model_folder, "cpu").to_json())
    return str(path)


@pytest.fixture
def new_trainer(request, monkeypatch):
    """``new_trainer(folder=None, **arguments)``, by default on the checkpoint of the module's ARCHITECTURE, else on the dense one."""
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    if architecture := getattr(request.module, "ARCHITECTURE", None):
        model, contract = request.getfixturevalue("checkpoint_of")(architecture)
    else:
        model, contract = (request.getfixturevalue(name) for name in ("model_folder", "contract_file"))
    monkeypatch.setenv(CONTRACT_VARIABLE, contract)
    made = []

    def make(folder=None, **arguments):
        made.append(PolicyTrainer(str(folder or model), **arguments))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture(scope="module")
def alone(trainer, sequences):
    """What the module's ``trainer`` scores with every sequence in a micro-batch of its own."""
    return trainer.logprobs(sequences, temperature=0.7, with_rows=True, packing=[[i] for i in range(len(sequences))])


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
