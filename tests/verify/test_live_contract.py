"""Mutations of live processes: a real vLLM engine and a real Megatron trainer, one of which is no longer what the contract says."""

import dataclasses
import json
from pathlib import Path

import pytest

from isoexec.contract import Claims, ContractError, Identity, contract_for_model
from isoexec.runtimes import compose
from isoexec.runtimes.handshake import check_weights, handshake
from isoexec.verify.protocol import WorkerGroup, WorkerRefused

HERE = str(Path(__file__).parent)
SHAPE = {"max_num_seqs": 4, "max_num_batched_tokens": 128}
TIMEOUT = 500


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from isoexec.verify.checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("model") / "hybrid", "Qwen3_5ForCausalLM")


@pytest.fixture(scope="module")
def contract(model):
    return compose.composed(contract_for_model(model, "cpu"))


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    with WorkerGroup(tmp_path_factory.mktemp("logs")) as group:
        yield group


def worker(group, role):
    environment = {"MUTABLE": role, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": HERE}
    return group.start(role, "mutable_worker", environment)


@pytest.fixture(scope="module")
def engine(group):
    return worker(group, "engine")


@pytest.fixture(scope="module")
def trainer(engine, group):
    return worker(group, "trainer")


@pytest.fixture
def open_with(model, tmp_path):
    def open_with(side, contract):
        """Opened under a contract, or the text of one."""
        file = tmp_path / f"{side.name}.json"
        file.write_text(contract if isinstance(contract, str) else contract.to_json())
        more = {"shape": SHAPE} if side.name == "engine" else {"learning_rate": 1e-3}
        side.call("open", TIMEOUT, model=str(model), contract=str(file), **more)
        return side

    return open_with


def identities(*sides):
    return {side.name: side.call("identity", TIMEOUT) for side in sides}


def manifests(*sides):
    return {side.name: side.call("weights", TIMEOUT) for side in sides}


def test_a_real_engine_and_a_real_trainer_agree(engine, trainer, contract, open_with):
    open_with(engine, contract), open_with(trainer, contract)
    assert handshake(contract, identities(engine, trainer)) == []
    assert len(check_weights(contract, manifests(engine, trainer))) == 64
    ours = [Identity.from_json(text) for text in identities(engine, trainer).values()]
    assert {identity.role for identity in ours} == {"engine", "trainer"}
    assert ours[0].numerical_policy["packages"]["vllm"] and ours[0].numerical_policy["ops"]["gdn.cpr_wy_decode"]


def leaves(value, path=()):
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if not items:
        yield path
    for key, item in items:
        yield from leaves(item, (*path, key))


def changed(data, path):
    data = json.loads(json.dumps(data))
    at = data
    for key in path[:-1]:
        at = at[key]
    value = at[path[-1]]
    at[path[-1]] = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"{value}x"
    return json.dumps(data)


def test_every_entry_of_a_real_engines_identity(engine, trainer, contract, open_with):
    """As recorded from the engine's process, one entry at a time: what can move a bit is refused, the rest is logged."""
    open_with(engine, contract), open_with(trainer, contract)
    found = identities(engine, trainer)
    data = json.loads(found["engine"])
    paths = [path for path in leaves(data) if path[0] != "role"]
    refused = [path for path in paths if path[0] != "deployment"]
    assert len(refused) > 200 and len(paths) > len(refused)
    for path in paths:
        sides = {"trainer": found["trainer"], "engine": changed(data, path)}
        if path[0] == "deployment":
            assert [d.path for d in handshake(contract, sides)] == [".".join(path)]
            continue
        with pytest.raises(ContractError) as error:
            handshake(contract, sides)
        named = str(error.value).partition(":")[0]
        assert named.startswith(f"{path[0]}.") and "engine has" in str(error.value), path
        assert all(step in named or step in ("region", "cases") for step in path if isinstance(step, str)), (path, named)


@pytest.mark.parametrize(
    ("change", "entry"),
    [
        ({"gdn_chunk": 32}, r"composition.gdn_core\[.*\].constants.gdn_chunk: .*0x00000020"),
        ({"row_leaves": 4}, "composition.row_parallel_linear.constants.row_leaves: .*0x00000004"),
        ({"vocab_block": 128}, r"composition.logprob\[.*\].constants.vocab_block: .*0x00000080"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_engine_of_another_contract(engine, trainer, contract, open_with, change, entry):
    """The chunk size, the number of leaves, a block: such an engine runs, and is refused before the sync."""
    other = compose.composed(dataclasses.replace(contract, composition=(), numerics=dataclasses.replace(contract.numerics, **change)))
    open_with(engine, other), open_with(trainer, contract)
    with pytest.raises(ContractError, match=f"numerical_policy.contract.{entry}.*; start both sides with the same ISOEXEC_CONTRACT"):
        handshake(contract, identities(engine, trainer))


def test_a_degree(engine, trainer, contract, open_with):
    open_with(engine, contract), open_with(trainer, dataclasses.replace(contract, claims=Claims(trainer_tp=2)))
    with pytest.raises(ContractError, match="contract.claims.trainer_tp: the contract has 1, trainer has 2; start both sides"):
        handshake(contract, identities(engine, trainer))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("composition", "gdn_edges", "constants", "l2norm_epsilon"), "gdn_edges.constants.l2norm_epsilon: .*0x358637be.*0x358637bd"),
        (("logprobs", "temperature"), "logprobs.temperature: expected 'fp32_division', found 'bf16_division'"),
        (("schedule_version",), "schedule_version: this build implements 1, the contract asks for 2"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_contract_that_this_build_does_not_run(request, contract, open_with, side, edit, message):
    """A constant by one ulp, another temperature rule, another version: neither process starts."""
    data = json.loads(contract.to_json())
    if edit[0] == "composition":
        [entry] = [entry for entry in data["composition"] if entry["region"] == edit[1]]
        constants = entry["constants"]
        constants[edit[3]] = f"0x{int(constants[edit[3]], 16) + 1:08x}"
    elif edit[0] == "logprobs":
        data["logprobs"]["temperature"] = "bf16_division"
    else:
        data["schedule_version"] += 1
    with pytest.raises(WorkerRefused, match=message):
        open_with(request.getfixturevalue(side), json.dumps(data))


@pytest.mark.parametrize(
    ("statement", "restore", "message"),
    [
        (
            "import torch; torch.set_float32_matmul_precision('high')",
            "torch.set_float32_matmul_precision('highest')",
            'math.float32_matmul_precision: engine has "highest", trainer has "high"; leave torch',
        ),
        (
            "import torch; torch.set_flush_denormal(True)",
            "torch.set_flush_denormal(False)",
            'math.subnormals: engine has "kept", trainer has "flushed"; leave torch',
        ),
    ],
    ids=["matmul_precision", "flushed_subnormals"],
)
def test_a_process_that_changes_while_it_runs(engine, trainer, contract, open_with, statement, restore, message):
    open_with(engine, contract), open_with(trainer, contract)
    assert handshake(contract, identities(engine, trainer)) == []
    trainer.call("run", TIMEOUT, statement=statement)
    try:
        with pytest.raises(ContractError, match=message):
            handshake(contract, identities(engine, trainer))
    finally:
        trainer.call("run", TIMEOUT, statement=restore)
    assert handshake(contract, identities(engine, trainer)) == []


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_parameter_that_was_cast(request, engine, trainer, contract, open_with, side):
    open_with(engine, contract), open_with(trainer, contract)
    path = {"engine": "_engine._runner.get_model().model.layers[0].linear_attn", "trainer": "_trainer.gpt.decoder.layers[0].self_attention"}
    parameter = f"operations.{path[side]}.A_log"
    request.getfixturevalue(side).call("run", TIMEOUT, statement=f"{parameter}.data = {parameter}.data.bfloat16()")
    with pytest.raises(ContractError, match=f"layers.0.linear_attn.A_log: dtype: the contract says float32, {side} has bfloat16"):
        check_weights(contract, manifests(engine, trainer))
