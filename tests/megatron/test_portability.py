"""Upstream's own paths without CUDA, and what the layers keep of upstream: overlapped communication, experts, checkpoints."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from ranks import on_ranks

from isoexec.contract import CONTRACT_VARIABLE
from isoexec.ops._core.bits import as_bits
from isoexec.runtimes.megatron import model as models
from isoexec.runtimes.megatron import trainer as runtime


def two_steps(contract: str, model: str, sequences: list, overlap: bool):
    """On one data-parallel rank, which trains on its half of the sequences."""
    os.environ[CONTRACT_VARIABLE] = contract
    if overlap:  # this process runs this function alone: nothing else sees the change
        models.DistributedDataParallelConfig = functools.partial(
            models.DistributedDataParallelConfig, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=20_000
        )
    trainer = runtime.PolicyTrainer(model)
    own = sequences[torch.distributed.get_rank() :: 2]
    losses = [trainer.train_step(own, None, 1.0)["loss"] for _ in range(2)]
    scores = trainer.logprobs(sequences, temperature=1.0)  # with overlap, gathers the parameters of the last step
    trainer.close()
    return losses, [as_bits(s.logprobs).tolist() for s in scores]


def test_overlapped_communication_moves_no_bit(contract_file, model_folder, sequences):
    """Parameters are gathered when a module's forward begins: the layers read every weight through its module."""
    plain = on_ranks(2, two_steps, contract_file, model_folder, sequences, False)
    overlapped = on_ranks(2, two_steps, contract_file, model_folder, sequences, True)
    assert plain == overlapped
    assert plain[0][1] == plain[1][1], "both ranks hold the same policy"
    assert plain[0][0] != plain[1][0], "and have trained on different halves"


def experts(degree: int):
    """Loss and gradient norm of upstream's mixture of experts with the all-to-all dispatcher."""
    os.environ[CONTRACT_VARIABLE] = ""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(expert_model_parallel_size=degree)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=degree,
        add_bias_linear=False,
        gated_linear_unit=True,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # the same experts wherever they lie
        first = parallel_state.get_expert_model_parallel_rank() * 4 // degree
        drawn = {}
        for name, parameter in model.named_parameters():
            if "local_experts" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for layer in range(2):
            for expert in range(4):
                for part, shape in (("linear_fc1", (64, 32)), ("linear_fc2", (32, 32))):
                    drawn[layer, expert, part] = torch.randn(shape, generator=generator) * 0.1
        for name, parameter in model.named_parameters():
            if "local_experts" in name:
                words = name.split(".")
                parameter.copy_(drawn[int(words[2]), first + int(words[-3]), words[-2]])
    ids = torch.arange(16).view(2, 8) * 3
    loss = model(ids, torch.arange(8).expand(2, 8), None, labels=ids).mean()
    loss.backward()
    router = model.decoder.layers[0].mlp.router.weight.grad
    parallel_state.destroy_model_parallel()
    return loss.item(), router.norm().item()


def test_experts_train_without_cuda():
    alone = on_ranks(1, experts, 1)[0]
    assert alone[0] > 0 and alone[1] > 0
    for loss, router in on_ranks(2, experts, 2):
        assert loss == pytest.approx(alone[0], rel=1e-5) and router == pytest.approx(alone[1], rel=1e-4)


def test_distributed_checkpoints_are_upstreams(contract_file, model_folder):
    """A checkpoint written under a contract is one of upstream's layers: same keys, shapes, shards and dtypes."""

    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    def described(contract: str):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CONTRACT_VARIABLE, contract)
            trainer = runtime.PolicyTrainer(model_folder)
        try:
            state = trainer.gpt.sharded_state_dict()
            apply_factories(state)
            return sorted(
                (tensor.key, str(tensor.dtype), tensor.local_shape, tensor.global_shape, tensor.global_offset)
                for tensor in nested_values(state)
                if isinstance(tensor, ShardedTensor)
            )
        finally:
            trainer.close()

    ours, native = described(contract_file), described("")
    assert len(ours) > 20 and ours == native
