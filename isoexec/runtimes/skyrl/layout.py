"""The layout that a run's configuration asks of the trainer, and the contract that claims it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from transformers import AutoConfig

from isoexec.contract import ContractError, ExecutionContract, contract_for_model, model_digest, read_config
from isoexec.contract.layouts import Layout, check_claims, check_degrees, check_engine, check_sizes
from isoexec.runtimes import evidence
from isoexec.runtimes.megatron.mapping import architecture_of, experts_of, linear_layers, sparse_layers
from isoexec.runtimes.skyrl.config import TrainConfig, uses_gpus

_WHERE, _ENGINE = "trainer.policy.megatron_config.", "generator.inference_engine."


def layout_of(config: TrainConfig) -> Layout:
    """The trainer's layout: degrees of the configuration, sizes of its checkpoint.

    Raises:
        ContractError: the checkpoint's configuration is none that the Megatron runtime knows, or Megatron could not build this layout.
    """
    text = _text_config(config.trainer.policy.model.path)
    degrees, placement = config.trainer.policy.megatron_config, config.trainer.placement
    tensor, expert_tensor = degrees.tensor_model_parallel_size, degrees.expert_tensor_parallel_size
    layout = Layout(
        num_layers=text.num_hidden_layers,
        num_query_groups=text.num_key_value_heads,
        num_moe_experts=experts_of(text) if any(sparse_layers(text)) else None,
        linear_num_key_heads=text.linear_num_key_heads if any(linear_layers(text)) else None,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=degrees.pipeline_model_parallel_size,
        context_parallel_size=degrees.context_parallel_size,
        expert_model_parallel_size=degrees.expert_model_parallel_size,
        expert_tensor_parallel_size=tensor if expert_tensor is None else expert_tensor,  # as Megatron makes its groups
        sequence_parallel=tensor > 1,  # as the policy worker builds its model
    )
    check_sizes(layout, placement.policy_num_nodes * placement.policy_num_gpus_per_node, _WHERE)
    return layout


def run_contract(config: TrainConfig) -> ExecutionContract:
    """The contract of a run, of which the composition may be left open: that of ``isoexec.contract``, or one that claims the layout.

    Args:
        config: resolved.

    Raises:
        ContractError: the contract or the checkpoint cannot be used, or the layout is none that keeps the contract's bits.
    """
    layout = layout_of(config)
    engine = config.generator.inference_engine
    if layout.num_moe_experts is not None and engine.data_parallel_size != 1:
        raise ContractError(
            f"generator.inference_engine.data_parallel_size: expected 1 for a model with experts, found {engine.data_parallel_size}: vLLM "
            "would split each expert over the data-parallel ranks; use generator.inference_engine.num_engines"
        )
    ranks = _engine_layout(config, layout)
    if config.isoexec.contract is not None:
        contract = _given(config)
        check_claims(contract.claims, layout, _WHERE)
        check_degrees(contract.numerics, layout, _WHERE)
    else:
        contract = contract_for_model(config.trainer.policy.model.path, _backend())
        check_degrees(contract.numerics, layout, _WHERE)
        degrees = {"engine_tp": ranks.tensor_model_parallel_size, "engine_ep": ranks.expert_model_parallel_size}
        contract = dataclasses.replace(contract, claims=dataclasses.replace(layout.claims(), **degrees))
    check_engine(contract.claims, contract.numerics, ranks, _ENGINE)
    return contract


def _engine_layout(config: TrainConfig, trainer: Layout) -> Layout:
    """The ranks of an engine, which share out tensors and whole experts.

    Raises:
        ContractError: experts that would be split, or shared out by other ranks.
    """
    engine, sparse = config.generator.inference_engine, trainer.num_moe_experts is not None
    expected = engine.tensor_parallel_size if sparse else 1
    if engine.expert_parallel_size != expected:
        raise ContractError(
            f"{_ENGINE}expert_parallel_size: expected {expected} with tensor_parallel_size {engine.tensor_parallel_size} and "
            f"{trainer.num_moe_experts or 'no'} experts, found {engine.expert_parallel_size}: ranks hold whole experts, since the K of an expert's "
            "matrices is never split"
        )
    degrees = {"tensor_model_parallel_size": engine.tensor_parallel_size, "expert_model_parallel_size": expected}
    one = {"pipeline_model_parallel_size": 1, "context_parallel_size": 1, "expert_tensor_parallel_size": 1, "sequence_parallel": False}
    return dataclasses.replace(trainer, **degrees, **one)


def _given(config: TrainConfig) -> ExecutionContract:
    """The contract in ``isoexec.contract``; a run's processes would refuse another backend or model than its own."""
    file = config.isoexec.contract
    try:
        contract = ExecutionContract.from_json(Path(file).read_text(encoding="utf-8"))
        if contract.backend != _backend():
            raise ContractError(
                f"backend: the contract names {contract.backend!r}, this run computes on {_backend()!r}; build a contract for this backend"
            )
        evidence.check_model(contract, model_digest(read_config(config.trainer.policy.model.path)))
    except (OSError, ValueError) as error:  # also the contract's own
        raise ContractError(f"isoexec.contract: {file}: {error}") from error
    return contract


def _backend() -> str:
    return "cuda" if uses_gpus() else "cpu"


def _text_config(folder: str):
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ContractError(f"model {folder!r}: config.json cannot be used: {' '.join(str(error).split())[:200]}") from error
    architecture_of(config)
    return config.get_text_config()
