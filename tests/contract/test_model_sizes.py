"""A contract's constants follow from the sizes in ``config.json``, whatever a family calls them."""

import json

import pytest

from isoexec.contract import ContractError
from isoexec.contract.build import contract_for_model

GLM = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}


@pytest.fixture
def contract_of(tmp_path):
    def build(**changes):
        (tmp_path / "config.json").write_text(json.dumps(GLM | changes))
        return contract_for_model(tmp_path, "cpu")

    return build


def test_glm_of_the_published_sizes(contract_of):
    contract = contract_of()
    assert (contract.numerics.row_leaves, contract.numerics.combine_groups) == (8, 8)
    assert dict(contract.dtypes)["e_score_correction_bias"] == "float32"


@pytest.mark.parametrize(
    ("changes", "leaves", "groups"),
    [
        ({"v_head_dim": 16}, 4, 8),  # 20 * 16 = 4 leaves of 80
        ({"qk_nope_head_dim": 8, "qk_rope_head_dim": 8}, 8, 8),  # no width of a row-parallel product
        ({"moe_intermediate_size": 64}, 4, 8),
        ({"moe_intermediate_size": 64, "n_shared_experts": 2}, 8, 8),
        ({"moe_intermediate_size": 64, "n_shared_experts": None}, 8, 8),
        ({"n_routed_experts": 36}, 8, 4),
    ],
)
def test_widths_and_experts_decide(contract_of, changes, leaves, groups):
    numerics = contract_of(**changes).numerics
    assert (numerics.row_leaves, numerics.combine_groups) == (leaves, groups)


@pytest.mark.parametrize("name", ["kv_lora_rank", "v_head_dim", "n_routed_experts", "n_shared_experts"])
def test_a_size_that_is_none_is_refused_by_name(contract_of, name):
    with pytest.raises(ContractError, match=f"{name}: expected a positive integer, found -1"):
        contract_of(**{name: -1})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: expected None, found {.*: matrix products would be quantised"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu' or None, found 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type: expected None or 'default', found 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type: expected None or 'default' or 'mrope', found 'linear'"),
        ({"use_sliding_window": True}, "use_sliding_window: expected None or False, found True: its bits are not proven"),
        ({"norm_topk_prob": False}, "norm_topk_prob: expected None or True, found False"),
    ],
)
def test_a_checkpoint_of_another_function_is_refused_by_the_entry(contract_of, entries, message):
    with pytest.raises(ContractError, match=f"config.json: {message}"):
        contract_of(**entries)


def test_entries_of_a_nested_file_are_looked_at_inside_and_outside(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}

    def build(inside=None, **outside):
        config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": sizes | (inside or {}), **outside}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return contract_for_model(tmp_path, "cpu")

    assert build().architecture == "Qwen3_5ForConditionalGeneration"
    with pytest.raises(ContractError, match="quantization_config: expected None"):
        build(quantization_config={"quant_method": "awq"})
    with pytest.raises(ContractError, match="attention_bias: expected None or False, found True"):
        build({"attention_bias": True})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: expected one of Qwen3ForCausalLM, .*, found LlamaForCausalLM"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of the 20 of num_attention_heads, found 3"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok: expected at most the 64 experts, found 65"),
        ({"rope_parameters": [1]}, r"rope_parameters: expected an object, found \[1\]"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta: expected a positive number, found 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a positive number, found nan"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a positive number, found '1e-6'"),
        ({"num_local_experts": "8"}, "num_local_experts: expected a positive integer, found '8'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(contract_of, entries, message):
    with pytest.raises(ContractError, match=f"config.json: {message}"):
        contract_of(**entries)


@pytest.mark.parametrize("name", ["v_head_dim", "moe_intermediate_size", "num_attention_heads", "hidden_size"])
def test_a_size_that_is_missing_is_named(contract_of, name):
    with pytest.raises(ContractError, match=f"config.json: {name} is missing"):
        contract_of(**{name: None})
