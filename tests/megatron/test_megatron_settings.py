"""Megatron settings that would leave the contract are refused by name, before a model is built."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from isoexec.contract import Claims, ContractError, ExecutionContract, Numerics
from isoexec.runtimes.megatron import settings

CONTRACT = ExecutionContract("Qwen3ForCausalLM", "cpu")


@pytest.fixture
def config():
    """A configuration that the contract allows."""
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )


def every_setting():
    return [pytest.param(s, id=s.path) for s in settings.COMMON + settings.ARCHITECTURES["Qwen3ForCausalLM"]]


def test_the_allowed_configuration_passes(config):
    settings.check(CONTRACT, config)


@pytest.mark.parametrize("setting", every_setting())
def test_every_setting_is_refused_by_name(config, setting):
    assert setting.path in {f.name for f in dataclasses.fields(TransformerConfig)}
    allowed = getattr(config, setting.path)
    other = {bool: lambda: not allowed, float: lambda: 0.5, str: lambda: "another"}.get(type(allowed), lambda: 12345)()
    setattr(config, setting.path, other)
    with pytest.raises(ContractError, match=rf"^{setting.path}: expected .*, found .*; set it to "):
        settings.check(CONTRACT, config)


@pytest.mark.parametrize("field", ["tensor", "pipeline", "expert"])
def test_a_degree_beyond_the_claim_is_refused(config, field):
    name = f"{field}_model_parallel_size"
    setattr(config, name, 2)
    with pytest.raises(ContractError, match=f"^{name}: the contract claims at most 1 .*, found 2"):
        settings.check(CONTRACT, config)


def test_no_claim_allows_context_parallelism(config):
    config.context_parallel_size = 2
    with pytest.raises(ContractError, match="^context_parallel_size: expected 1, found 2: no layer fetches keys, values or states"):
        settings.check(dataclasses.replace(CONTRACT, claims=Claims(trainer_cp=2)), config)


def test_tensor_parallelism_keeps_heads_and_leaves_whole(config):
    config.tensor_model_parallel_size = 4
    contract = dataclasses.replace(CONTRACT, claims=Claims(trainer_tp=4))
    with pytest.raises(ContractError, match="divisor of the 2 key/value heads, found 4"):
        settings.check(contract, config)
    config.num_query_groups, config.tensor_model_parallel_size = 3, 3
    with pytest.raises(ContractError, match="divisor of numerics.row_leaves 8, found 3"):
        settings.check(contract, config)


def test_sequence_parallelism_needs_its_claim(config):
    config.tensor_model_parallel_size = 2
    config.sequence_parallel = True
    with pytest.raises(ContractError, match="sequence_parallel: the contract claims false"):
        settings.check(dataclasses.replace(CONTRACT, claims=Claims(trainer_tp=2)), config)
    settings.check(dataclasses.replace(CONTRACT, claims=Claims(trainer_tp=2, trainer_sp=True)), config)


def test_another_backend_or_architecture_is_refused(config):
    with pytest.raises(ContractError, match="backend: the contract names 'cuda', this process computes on 'cpu'"):
        settings.check(dataclasses.replace(CONTRACT, backend="cuda"), config)
    with pytest.raises(ContractError, match="architecture: .* the contract names LlamaForCausalLM"):
        settings.check(dataclasses.replace(CONTRACT, architecture="LlamaForCausalLM"), config)


def test_activation_leaves_one_torch_thread(config):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        settings.activate(dataclasses.replace(CONTRACT, numerics=Numerics()), config)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_model_outside_the_contract_is_not_built(under_contract, model_folder, monkeypatch):
    from isoexec.runtimes.megatron import model as models
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    allowed = models.transformer_config
    monkeypatch.setattr(models, "transformer_config", lambda *a, **k: allowed(*a, **k, hidden_dropout=0.1))
    with pytest.raises(ContractError, match="hidden_dropout: expected 0.0, found 0.1"):
        PolicyTrainer(model_folder)
    assert not torch.distributed.is_initialized(), "a refused trainer leaves no process group"
