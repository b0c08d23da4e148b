"""Small models under a contract, an engine and a trainer in this process: importing their frameworks costs far more than they do."""

from __future__ import annotations

import importlib.util

import pytest

from isoexec.contract import CONTRACT_VARIABLE, Numerics, read_config
from isoexec.contract.build import contract_for_model
from isoexec.verify.audit import engine_worker, trainer_worker
from isoexec.verify.audit.run import engine_shape, tokens


@pytest.fixture(scope="session")
def audited_model(tmp_path_factory):
    """(checkpoint, contract file) of a dense model of two layers."""
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    trainer_worker.make_checkpoint(str(folder), "Qwen3ForCausalLM", {"num_hidden_layers": 2})
    file = tmp_path_factory.mktemp("contract") / "contract.json"
    file.write_text(contract_for_model(folder, "cpu").to_json())
    return str(folder), str(file)


@pytest.fixture(scope="module")
def contract_chosen():
    """The operations name the contract in the environment; afterwards it is as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONTRACT_VARIABLE, "")
        yield


@pytest.fixture(scope="module")
def audit_engine(audited_model, contract_chosen):
    """Audits the engine; returns what :func:`isoexec.verify.audit.report.evidence` gives."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; run `make build`")
    operations = engine_worker.start()
    model, contract = audited_model
    operations["open"](model=model, contract=contract, shape=engine_shape(read_config(model), Numerics()))
    prompts, _ = tokens(512)
    yield lambda: operations["audit"](prompts=prompts[:3], seeds=[1, 2, 3])
    operations["close"]()


@pytest.fixture(scope="module")
def audit_trainer(audited_model, contract_chosen):
    """Audits the trainer, likewise."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed; run `make build`")
    operations = trainer_worker.start()
    model, contract = audited_model
    operations["open"](model=model, contract=contract, aux_loss=0.0)
    _, sequences = tokens(512)
    yield lambda: operations["audit"](sequences=sequences[:3], packing=[[0, 2], [1]])
    operations["close"]()
