"""The layout of every recipe is one that the Megatron runtime proves, and the run's contract claims it, before anything starts."""

import dataclasses
import json

import pytest

from isoexec.contract import ContractError, contract_for_model
from isoexec.contract.layouts import check_claims, check_degrees
from isoexec.runtimes.skyrl.config import TrainConfig
from isoexec.runtimes.skyrl.layout import layout_of, run_contract
from isoexec.train.compose import RECIPES, recipe_names

#: Qwen3.5-35B-A3B by its published sizes; what it does not say is the architecture's default.
_TEXT = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
}
_LARGE = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": _TEXT}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("35b")
    (folder / "config.json").write_text(json.dumps(_LARGE))
    return str(folder)


@pytest.fixture
def typed(composed, large):
    """``typed(recipe, *overrides)``: SkyRL's configuration of a recipe, with the model that it is for."""
    own = {"node": large, "nodes": large, "gpu": str(RECIPES / "start" / "dense")}

    def get(recipe, *overrides, model=None):
        path = model or own.get(recipe)
        config = composed(recipe, *([f"trainer.policy.model.path={path}"] if path else []), *overrides)
        del config["recipe"]
        return TrainConfig.from_dict_config(config)

    return get


@pytest.mark.parametrize("recipe", recipe_names())
def test_the_contract_of_every_recipe_claims_its_layout(typed, recipe):
    config = typed(recipe)
    layout, contract = layout_of(config), run_contract(config)
    for part in ("tensor", "pipeline", "expert"):
        name = f"{part}_model_parallel_size"
        assert getattr(layout, name) == getattr(config.trainer.policy.megatron_config, name)
    check_claims(contract.claims, layout)  # what the policy's actors check
    check_degrees(contract.numerics, layout)
    assert contract.claims.trainer_ep == (8 if recipe in ("node", "nodes") else 1)
    if contract.claims.trainer_ep > 1:
        with pytest.raises(ContractError, match="expert_model_parallel_size: the contract claims at most 1"):
            check_claims(contract_for_model(config.trainer.policy.model.path, "cpu").claims, layout)


@pytest.mark.parametrize("recipe", ["node", "nodes"])
def test_every_node_recipe_spreads_the_experts_over_a_node(typed, recipe):
    layout = layout_of(typed(recipe))
    assert (layout.num_moe_experts, layout.num_query_groups, layout.linear_num_key_heads, layout.num_layers) == (256, 2, 16, 40)
    assert layout.expert_model_parallel_size == 8 and not layout.sequence_parallel


def test_tensor_parallelism_brings_sequence_parallelism_and_both_are_claimed(typed):
    degrees = [f"trainer.policy.megatron_config.{name}" for name in ("tensor_model_parallel_size=2", "expert_model_parallel_size=4")]
    claims = run_contract(typed("node", *degrees)).claims
    assert (claims.trainer_tp, claims.trainer_sp, claims.trainer_ep, claims.trainer_pp) == (2, True, 4, 1)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ("context_parallel_size=2", "context_parallel_size: expected 1, found 2: no layer fetches keys"),
        ("tensor_model_parallel_size=8", "tensor_model_parallel_size: expected a divisor of the 2 key/value heads, found 8"),
        ("expert_model_parallel_size=16", "expert_model_parallel_size: 16 x .* expected a divisor of the 8 ranks of the policy"),
        ("expert_model_parallel_size=3", "expert_model_parallel_size: 3 x .* expected a divisor of the 8 ranks"),
        ("pipeline_model_parallel_size=16", "pipeline_model_parallel_size: expected a divisor of the 40 layers, found 16"),
        (
            "expert_tensor_parallel_size=null tensor_model_parallel_size=2 expert_model_parallel_size=4",
            "expert_tensor_parallel_size: expected 1, found 2: the K of an expert",
        ),
    ],
)
def test_a_layout_that_is_not_proven_is_refused_by_its_key(typed, degrees, message):
    with pytest.raises(ContractError, match=f"^trainer.policy.megatron_config.{message}"):
        run_contract(typed("node", *(f"trainer.policy.megatron_config.{degree}" for degree in degrees.split())))


@pytest.mark.parametrize("degree", [1, 2])
def test_ranks_of_an_engine_share_out_whole_experts_and_are_claimed(typed, degree):
    asked = [f"generator.inference_engine.{name}_parallel_size={degree}" for name in ("tensor", "expert")]
    claims = run_contract(typed("node", *asked)).claims
    assert (claims.engine_tp, claims.engine_ep, claims.engine_pp) == (degree, degree, 1)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ("tensor=4 expert=4", "tensor_model_parallel_size: expected a divisor of the 2 key/value heads, found 4"),
        ("tensor=2 expert=1", "expert_parallel_size: expected 2 with tensor_parallel_size 2 and 256 experts, found 1: ranks hold whole experts"),
        ("tensor=1 expert=2", "expert_parallel_size: expected 1 with tensor_parallel_size 1 and 256 experts, found 2"),
    ],
)
def test_ranks_of_an_engine_that_are_not_proven_are_refused_by_their_key(typed, degrees, message):
    asked = (f"generator.inference_engine.{name}_parallel_size={value}" for name, value in (each.split("=") for each in degrees.split()))
    with pytest.raises(ContractError, match=f"^generator.inference_engine.{message}"):
        run_contract(typed("node", *asked))


def test_a_contract_that_is_given_has_to_claim_the_engine(typed, tmp_path):
    file = tmp_path / "contract.json"
    file.write_text(contract_for_model(RECIPES / "start" / "dense", "cpu").to_json())
    with pytest.raises(ContractError, match=r"inference_engine.tensor_model_parallel_size: the contract claims at most 1 \(claims.engine_tp\)"):
        run_contract(typed("tiny-dense", f"isoexec.contract={file}", "generator.inference_engine.tensor_parallel_size=2"))


def test_the_combine_bounds_the_experts_degree(typed):
    degrees = "trainer.policy.megatron_config.expert_model_parallel_size=16"
    with pytest.raises(ContractError, match="expected a divisor of numerics.combine_groups 8, and that one of 256 experts, found 16"):
        run_contract(typed("nodes", degrees))


def test_a_dense_model_has_no_experts_to_spread(typed):
    with pytest.raises(ContractError, match="expert_model_parallel_size: expected 1 for a model without experts, found 8"):
        run_contract(typed("node", model=RECIPES / "start" / "dense"))


def test_a_contract_that_is_given_has_to_claim_the_layout(typed, large, tmp_path):
    file = tmp_path / "contract.json"
    contract = contract_for_model(large, "cpu")
    file.write_text(contract.to_json())
    with pytest.raises(ContractError, match=r"expert_model_parallel_size: the contract claims at most 1 \(claims.trainer_ep\), found 8"):
        run_contract(typed("node", f"isoexec.contract={file}"))
    claims = dataclasses.replace(contract.claims, trainer_ep=8)
    file.write_text(dataclasses.replace(contract, claims=claims).to_json())
    assert run_contract(typed("node", f"isoexec.contract={file}")).claims == claims


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda contract: dataclasses.replace(contract, backend="cuda").to_json(), "the contract names 'cuda', this run computes on 'cpu'"),
        (lambda contract: dataclasses.replace(contract, model="0" * 64).to_json(), "a checkpoint whose configuration has sha256 000"),
        (lambda contract: "{", "."),
    ],
)
def test_a_contract_of_another_run_is_refused_before_anything_starts(typed, tmp_path, change, message):
    file = tmp_path / "contract.json"
    file.write_text(change(contract_for_model(RECIPES / "start" / "dense", "cpu")))
    with pytest.raises(ContractError, match=f"^isoexec.contract: .*contract.json: .*{message}"):
        run_contract(typed("tiny-dense", f"isoexec.contract={file}"))


def test_engines_do_not_share_out_experts_over_data_parallel_ranks(typed):
    with pytest.raises(ContractError, match="data_parallel_size: expected 1 for a model with experts, found 2"):
        run_contract(typed("node", "generator.inference_engine.data_parallel_size=2"))


def test_a_checkpoint_that_the_trainer_does_not_know_is_refused(typed, tmp_path):
    for config, message in (
        (_LARGE | {"architectures": ["LlamaForCausalLM"]}, "found architecture LlamaForCausalLM"),
        (_LARGE | {"model_type": "none_such"}, "config.json cannot be used: .*none_such"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ContractError, match=message):
            run_contract(typed("node", model=tmp_path))
