"""A policy in Megatron: scores tokens and takes optimizer steps, under a contract or as upstream does.

With ``ISOEXEC_CONTRACT`` set the patched ``GPTModel`` runs isoexec's ops and sequences are packed. Without it, the native arm runs
upstream's local layer spec (no Transformer Engine), whose attention takes no packed sequences: the groups of ``packing`` become
right-padded batches instead, and the logprob is torch's log_softmax of the bf16 logits in fp32.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Sequence
from typing import NamedTuple

import torch
from megatron.core.device import device_type
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import is_checkpointing
from transformers import AutoConfig

from isoexec.contract import ContractError, Identity, active_contract
from isoexec.contract.manifest import Manifest
from isoexec.ops._core import registry
from isoexec.ops._core.bits import row_digests
from isoexec.ops._core.digest import PendingDigests
from isoexec.runtimes.handshake import process_identity
from isoexec.runtimes.megatron import model as models
from isoexec.runtimes.megatron import packing
from isoexec.runtimes.megatron.groups import ProcessGroups
from isoexec.runtimes.megatron.hf_files import HFFiles, save_hf
from isoexec.runtimes.megatron.packing import MicroBatch, Pair
from isoexec.runtimes.megatron.scoring import hidden_scorer, in_place_of_logits, scorer

DEFAULT_PACK = 4096  # tokens


class Score(NamedTuple):
    """Of one sequence: fp32 ``logprobs`` [generated tokens] on the CPU; ``row_digests`` of the fp32 log-probability rows, or None."""

    logprobs: torch.Tensor
    row_digests: list[str] | None


class PolicyTrainer:
    """An HF checkpoint as a trainable Megatron model.

    An observer of the ops (:func:`isoexec.ops._core.registry.observing`) is told which tokens they compute, by the index of the sequence
    among those that a call was given.

    Args:
        model: HF-format folder (config and safetensors).
        lr: Adam's learning rate.
        recompute: recompute activations in :meth:`train_step` (full, uniform).
        tensor_parallel, pipeline_parallel, sequence_parallel, expert_parallel: layout; more than one process needs ``torch.distributed``
            initialised. Expert-parallel ranks share out the tensor- and data-parallel ones.
        aux_loss: coefficient of the router's load-balancing loss in :meth:`train_step`; 0 leaves it out.
        seed: of Megatron's random number tracker.

    Raises:
        ContractError: the checkpoint or the layout is outside the contract.
    """

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-3,
        recompute: bool = False,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        sequence_parallel: bool = False,
        expert_parallel: int = 1,
        aux_loss: float = 0.0,
        seed: int = 0,
    ):
        self.contract = active_contract()
        self._folder = model
        self.hf_config = AutoConfig.from_pretrained(model)
        self._groups = ProcessGroups(tensor_parallel, pipeline_parallel, seed, expert_parallel)
        try:
            self._build(model, lr, recompute, sequence_parallel, aux_loss)
        except BaseException:
            self.close()
            raise

    def _build(self, folder: str, lr: float, recompute: bool, sequence_parallel: bool, aux_loss: float) -> None:
        groups = self._groups.collection
        self.device = torch.device(device_type())
        self.config = models.transformer_config(self.hf_config, groups, sequence_parallel=sequence_parallel, aux_loss=aux_loss)
        float16 = models.build_model(self.hf_config, self.config, groups, self.device)
        self.gpt = float16.module
        self._files = HFFiles(folder)
        models.load(self.gpt, self.hf_config, folder, groups)
        self.ddp, self.optimizer = models.wrap(float16, self.config, groups, lr)
        self.config.grad_scale_func = self._scaled
        self._recompute = recompute
        how = self.contract, self.hf_config.get_text_config().vocab_size, groups.tp, sequence_parallel
        self._scorer = scorer(*how)
        self._hidden_scorer = None if self.contract is None else hidden_scorer(*how)
        self._multiple_of = groups.tp.size() if sequence_parallel else 1

    def logprobs(
        self,
        sequences: Sequence[Pair],
        *,
        temperature: float,
        recompute: bool = False,
        packing: Sequence[Sequence[int]] | int = DEFAULT_PACK,
        with_rows: bool = False,
        grad: bool = False,
    ) -> list[Score]:
        """Logprobs of the generated tokens, per sequence in the given order.

        Args:
            sequences: (prompt tokens, generated tokens).
            temperature: of the distribution that was sampled.
            recompute: take the logprobs from the hidden states that activation recomputation makes during backward.
            packing: groups of sequences that share a micro-batch, or the tokens of a group.
            with_rows: add digests of the whole log-probability rows.
            grad: run forward with gradients, and backward (the gradients are dropped); else forward alone, without gradients.

        Returns:
            One :class:`Score` per sequence (on the last pipeline stage; elsewhere an empty list).
        """
        batches = self._micro_batches(sequences, packing)
        with self._configured(moe_router_bias_update_rate=0.0):  # upstream moves the experts' bias whenever gradients are complete
            if recompute:
                scored = self._score_recomputed(batches, temperature, with_rows)
            else:
                step = functools.partial(self._scoring_step, temperature=temperature, with_rows=with_rows)
                scored = self._run(step, batches, backward=grad)
        if grad or recompute:
            self.ddp.zero_grad_buffer()
        return _by_sequence(batches, scored) if scored else []

    def train_step(self, sequences: Sequence[Pair], advantages=None, temperature: float = 1.0, *, packing=DEFAULT_PACK) -> dict:
        """One optimizer step on -mean(advantage * logprob) over the generated tokens.

        Args:
            sequences: (prompt tokens, generated tokens).
            advantages: a float per sequence, or per sequence a float per generated token; None is 1 everywhere.
            temperature: of the policy.
            packing: as in :meth:`logprobs`.

        Returns:
            ``loss`` and ``grad_norm`` before clipping, floats; ``loss`` is None before the last pipeline stage.
        """
        batches = self._micro_batches(sequences, packing)
        tokens = sum(len(generated) for _, generated in sequences)
        weights = [_advantages(batch, advantages).to(self.device) * (len(batches) / tokens) for batch in batches]
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self._recomputation(self._recompute):
            losses = self._run(functools.partial(self._training_step, temperature=temperature), list(zip(batches, weights)), backward=True)
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise FloatingPointError(f"train_step: the optimizer refused the step, gradient norm {grad_norm}")
        return {"loss": sum(losses) / len(batches) if losses else None, "grad_norm": float(grad_norm)}

    def export_hf(self, path: str) -> None:
        """Write ``path/model.safetensors`` with the names and in the form of the checkpoint; every rank calls, rank 0 writes."""
        tensors = self._hf_tensors(torch.Tensor.detach)
        if torch.distributed.get_rank() == 0:
            save_hf(self._files.in_stored_form(tensors), path)

    def weight_manifest(self) -> Manifest:
        """Digest of every logical tensor; see :func:`isoexec.runtimes.megatron.model.weight_manifest`."""
        return models.weight_manifest(self.gpt, self.hf_config, self._groups.collection)

    def begin_weight_digests(self) -> PendingDigests:
        """The device's part of :meth:`weight_manifest`; see :func:`isoexec.runtimes.megatron.model.begin_weight_digests`."""
        return models.begin_weight_digests(self.gpt, self.hf_config, self._groups.collection)

    def hf_tensors(self) -> dict[str, torch.Tensor]:
        """Whole HF tensors of the policy where it is; on a GPU views, to be read before the next step. Every rank calls."""
        return models.hf_tensors(self.gpt, self.hf_config, self._groups.collection, device=self.device)

    def identity(self) -> Identity:
        """What this process runs, as evidence, for the handshake.

        Raises:
            ContractError: no contract is active, or the installation is not the contract's.
        """
        return process_identity("trainer", self._folder)

    def gradients(self) -> dict[str, torch.Tensor]:
        """fp32 gradients of the last :meth:`train_step`, clipped, whole, by HF name; every rank calls."""
        models.gather_gradients(self.ddp)
        return self._hf_tensors(lambda tensor: tensor.main_grad if tensor.requires_grad else None)

    def _hf_tensors(self, read) -> dict[str, torch.Tensor]:
        return models.hf_tensors(self.gpt, self.hf_config, self._groups.collection, read)

    def close(self) -> None:
        """Free the model and end the process groups that this trainer made."""
        self.gpt = self.ddp = self.optimizer = None
        self._groups.close()
        gc.collect()  # the model's cycles hold process groups, and those hold threads

    def _micro_batches(self, sequences, packs) -> list[MicroBatch]:
        groups = packing.groups_of(sequences, packs)
        if self.contract is None:
            return [packing.pad(sequences, group, self.device) for group in groups]
        return [packing.pack(sequences, group, self.device, self._multiple_of) for group in groups]

    def _run(self, step, items: list, *, backward: bool) -> list:
        """Megatron's pipeline schedule over ``items``; returns what ``step``'s loss functions reported (on the last stage)."""
        case = "trainer_forward" if backward else "trainer_score"
        self.ddp.train(backward)
        with self._executing(case), contextlib.nullcontext() if backward else torch.no_grad():
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(items),
                model=[self.ddp],
                num_microbatches=len(items),
                seq_length=0,  # sequence lengths vary and travel with the activations
                micro_batch_size=1,
                forward_only=not backward,
            )

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, or with experts the factor of the router's loss, as the optimizer scales it."""
        with registry.beyond_logprob():
            return self.optimizer.scale_loss(loss)

    def _output(self, model, batch: MicroBatch, temperature: float, with_rows: bool) -> torch.Tensor:
        """Of the last pipeline stage: logits, or logprobs where they are enough."""
        self._observe(batch)
        instead = self._instead(batch, temperature, with_rows)
        processor = {} if instead is None else {"output_processor": in_place_of_logits(instead)}
        return model(batch.input_ids, batch.position_ids, None, packed_seq_params=batch.packed, **processor)

    def _instead(self, batch: MicroBatch, temperature: float, with_rows: bool):
        """What the output layer gives in place of logits: logprobs, unless rows of logits are asked for or an observer is to see them."""
        if self._hidden_scorer is None or with_rows or registry.current_observer() is not None:
            return None
        return lambda x, weight: self._hidden_scorer(x.index_select(0, batch.rows), weight, batch.targets, temperature)

    def _scoring_step(self, iterator, model, temperature: float, with_rows: bool):
        batch = next(iterator)

        def report(output):
            logprobs, digests = self._digested(output, batch, temperature, with_rows)
            with registry.beyond_logprob():
                loss = logprobs.sum()
            return loss, (logprobs.detach(), digests)

        return self._output(model, batch, temperature, with_rows), report

    def _digested(self, output: torch.Tensor, batch: MicroBatch, temperature: float, with_rows: bool):
        """Logprobs and the digests of the rows, which are too many to be kept beyond their micro-batch; ``output``: see :meth:`_output`."""
        if self._instead(batch, temperature, with_rows) is not None:
            return output, None
        with self._observing_generated(batch):
            logprobs, rows = self._scorer(output, batch, temperature, with_rows)
            return logprobs, None if rows is None else row_digests(rows)

    def _training_step(self, iterator, model, temperature: float):
        batch, weight = next(iterator)

        def loss_of(output):
            logprobs, _ = self._digested(output, batch, temperature, False)
            with registry.beyond_logprob():
                loss = -(weight * logprobs).sum()
                return loss, loss.item()

        return self._output(model, batch, temperature, False), loss_of

    def _score_recomputed(self, batches: list[MicroBatch], temperature: float, with_rows: bool) -> list:
        """Score the last layer's output as backward recomputed it, one micro-batch after the other."""
        recomputed = []

        def keep(layer, arguments, output):
            if is_checkpointing() and torch.is_grad_enabled():  # a checkpoint's first pass runs without gradients
                recomputed.append(output[0].detach())

        step = functools.partial(self._scoring_step, temperature=temperature, with_rows=False)
        handle = self.gpt.decoder.layers[-1].register_forward_hook(keep)
        try:
            with self._recomputation(True):
                self._run(step, batches, backward=True)
        finally:
            handle.remove()
        if not self.gpt.post_process:
            return []
        scored = []
        with self._executing("trainer_recompute"), torch.no_grad():
            for hidden, batch in zip(recomputed, batches, strict=True):
                self._observe(batch, registry.HEAD)
                output = self._head(hidden, self._instead(batch, temperature, with_rows))
                scored.append(self._digested(output, batch, temperature, with_rows))
        return scored

    def _observe(self, batch: MicroBatch, layer: int = registry.EMBEDDING) -> None:
        """Tell an observer of the ops which tokens the rows of a pass are.

        Raises:
            ContractError: recomputation of another micro-batch would run between a pass's ops.
        """
        observer = registry.current_observer()
        if observer is None:
            return
        if self._groups.collection.pp.size() > 1 and torch.is_grad_enabled():
            raise ContractError("trace: expected one pipeline stage in training, found more; trace a scoring pass (grad=False)")
        observer.begin(*packing.rows_of(batch), layer)

    @contextlib.contextmanager
    def _observing_generated(self, batch: MicroBatch):
        """The rows inside the block are those of the generated tokens; backward, which may recompute, has all of them again."""
        observer = registry.current_observer()
        if observer is None:
            yield
            return
        sequence, position = packing.rows_of(batch)
        rows = batch.rows.cpu()
        observer.select(sequence[rows], position[rows])
        yield
        observer.select(sequence, position)

    def _head(self, hidden: torch.Tensor, instead) -> torch.Tensor:
        """Logits [B, S, V / tp] of the last layer's output [S, B, D], or what ``instead`` makes of it."""
        weight = self.gpt.shared_embedding_or_output_weight() if self.gpt.share_embeddings_and_output_weights else None
        hidden = self.gpt.decoder.final_layernorm(hidden)
        if instead is not None:
            return in_place_of_logits(instead)(hidden_states=hidden, output_layer=self.gpt.output_layer, output_weight=weight)
        logits, _ = self.gpt.output_layer(hidden, weight=weight)
        return logits.transpose(0, 1).float()

    def _recomputation(self, on: bool):
        """Activation recomputation of the whole stage as one piece, so that a recomputed state rests on recomputed ones alone."""
        if not on:
            return contextlib.nullcontext()
        return self._configured(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=len(self.gpt.decoder.layers)
        )

    @contextlib.contextmanager
    def _configured(self, **wanted):
        """Entries of Megatron's configuration that hold inside the block."""
        before = {name: getattr(self.config, name) for name in wanted}
        for name, value in wanted.items():
            setattr(self.config, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.config, name, value)

    def _executing(self, case: str):
        return contextlib.nullcontext() if self.contract is None else registry.executing(case)


def _advantages(batch: MicroBatch, advantages) -> torch.Tensor:
    """[generated tokens of the batch] fp32."""
    parts = []
    for index, count in zip(batch.indices, batch.counts, strict=True):
        value = torch.as_tensor(1.0 if advantages is None else advantages[index], dtype=torch.float32)
        parts.append(value.expand(count) if value.dim() == 0 else value)
        if parts[-1].shape != (count,):
            raise ValueError(f"advantages[{index}]: expected a float or {count} floats, found shape {tuple(value.shape)}")
    return torch.cat(parts)


def _by_sequence(batches: list[MicroBatch], scored: list) -> list[Score]:
    """Scores of the micro-batches, taken apart and put in the order of the sequences."""
    found = {}
    for batch, (logprobs, digests) in zip(batches, scored, strict=True):
        start = 0
        for index, count in zip(batch.indices, batch.counts, strict=True):
            part = slice(start, start + count)
            found[index] = Score(logprobs[part].detach().cpu(), None if digests is None else digests[part])
            start += count
    return [found[index] for index in range(len(found))]
