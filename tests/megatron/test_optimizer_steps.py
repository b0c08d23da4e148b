"""Optimizer steps under a contract: real DDP, distributed optimizer and schedule; the same bits from run to run."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from isoexec.ops._core.bits import bit_equal
from tests.ops.op_checks import same_bits

STEPS = 3


def train(trainer, sequences, **arguments):
    results = [trainer.train_step(sequences, None, 1.0, packing=100, **arguments) for _ in range(STEPS)]
    return results, trainer.gradients()


def test_the_loss_falls_and_the_logprobs_move(new_trainer, sequences):
    trainer = new_trainer()
    before = trainer.logprobs(sequences, temperature=1.0)
    results, _ = train(trainer, sequences)
    losses = [r["loss"] for r in results]
    total = torch.cat([s.logprobs for s in before])
    assert math.isclose(losses[0], -total.mean().item(), rel_tol=1e-5), "the first loss is that of the scored policy"
    assert losses[0] > losses[1] > losses[2] > 0
    assert all(math.isfinite(r["grad_norm"]) and r["grad_norm"] > 0 for r in results)
    assert torch.cat([s.logprobs for s in trainer.logprobs(sequences, temperature=1.0)]).sum() > total.sum()


def test_two_runs_give_the_same_bits(new_trainer, sequences, tmp_path):
    runs = []
    for name in ("one", "two"):
        trainer = new_trainer()
        results, gradients = train(trainer, sequences)
        trainer.export_hf(tmp_path / name)
        trainer.close()
        runs.append((results, gradients, load_file(tmp_path / name / "model.safetensors")))
    assert runs[0][0] == runs[1][0]
    for first, second in zip(runs[0][1:], runs[1][1:]):
        assert first.keys() == second.keys()
        for name in first:
            same_bits(first[name], second[name], name)


def test_recomputation_moves_no_gradient(new_trainer, sequences):
    gradients = []
    for recompute in (False, True):
        trainer = new_trainer(recompute=recompute)
        gradients.append(train(trainer, sequences)[1])
        trainer.close()
    for name in gradients[0]:
        same_bits(gradients[0][name], gradients[1][name], name)


def test_every_parameter_gets_a_gradient(new_trainer, sequences):
    trainer = new_trainer()
    trainer.train_step(sequences, None, 1.0)
    without = [name for name, gradient in trainer.gradients().items() if not gradient.any()]
    assert not without


def test_master_weights_are_fp32_and_sharded_by_the_optimizer(new_trainer, sequences):
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    trainer = new_trainer(lr=1e-6)
    assert isinstance(trainer.ddp, DistributedDataParallel)
    (optimizer,) = trainer.optimizer.chained_optimizers
    assert isinstance(optimizer, DistributedOptimizer)
    before = {name: p.detach().clone() for name, p in trainer.gpt.named_parameters()}
    masters = [p for group in optimizer.shard_fp32_from_float16_groups for p in group]
    assert masters and all(p.dtype == torch.float32 for p in masters)
    kept = [p.detach().clone() for p in masters]
    trainer.train_step(sequences, None, 1.0)
    assert all(not torch.equal(a, b) for a, b in zip(kept, masters)), "every master weight moves"
    moments = [optimizer.optimizer.state[p] for p in masters]
    assert all(m["exp_avg"].dtype == torch.float32 and m["exp_avg"].any() for m in moments)
    weight = "decoder.layers.0.mlp.linear_fc1.weight"
    changed = dict(trainer.gpt.named_parameters())[weight].ne(before[weight]).float().mean()
    assert changed < 0.5, "a step far below bf16's spacing must stay in the master weights"
    assert all(p.dtype == torch.bfloat16 for p in trainer.gpt.parameters())


def test_advantages_weigh_tokens(new_trainer, sequences):
    trainer = new_trainer(lr=0.0)
    pairs = sequences[:3]
    ones = trainer.train_step(pairs, [1.0] * 3, 1.0)
    plain = trainer.train_step(pairs, None, 1.0)
    assert ones == plain
    per_token = trainer.train_step(pairs, [[-1.0] * len(t) for _, t in pairs], 1.0)
    assert per_token["loss"] == -plain["loss"] and per_token["grad_norm"] == plain["grad_norm"]
    with pytest.raises(ValueError, match=r"advantages\[1\]: expected a float or 7 floats"):
        trainer.train_step(pairs, [1.0, [1.0], 1.0], 1.0)


def test_a_planted_ulp_moves_a_gradient(new_trainer, sequences):
    """Negative control of the equalities above."""
    from isoexec.ops._core.bits import nudge

    first = new_trainer()
    first.train_step(sequences, None, 1.0)
    expected = first.gradients()
    first.close()
    second = new_trainer()
    with torch.no_grad():
        weight = second.gpt.decoder.layers[0].input_layernorm.weight
        weight.copy_(nudge(weight))
    second.train_step(sequences, None, 1.0)
    assert not any(bit_equal(expected[n], g) for n, g in second.gradients().items() if n.endswith("down_proj.weight"))
