"""SkyRL's model wrapper with the logprobs that the engine samples with."""

from __future__ import annotations

import functools

import torch
from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper

from isoexec.contract import ExecutionContract
from isoexec.ops import logprob
from isoexec.ops._core import registry
from isoexec.runtimes.megatron.modules import tensor_parallel


class ContractWrapper(MegatronModelWrapper):
    """Takes logprobs with isoexec's ops.

    Args:
        contract: of this process.
        vocab_size: entries that exist; a model may hold padding beyond.
        sequence_parallel: as the model has it.
    """

    def __init__(self, *args, contract: ExecutionContract, vocab_size: int, sequence_parallel: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self._sizes = {"vocab_size": vocab_size, "vocab_block": contract.numerics.vocab_block}
        self._sequence_parallel = sequence_parallel

    def forward(self, *args, **kwargs) -> torch.Tensor:
        with registry.executing("trainer_score"):
            return super().forward(*args, **kwargs)

    def forward_backward_mini_batch(self, *args, **kwargs) -> list[dict]:
        with registry.executing("trainer_forward"):
            return super().forward_backward_mini_batch(*args, **kwargs)

    def scale_logits(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """[1, T, V / tp] fp32 logits / temperature."""
        # A tensor on both sides: a Python float would divide in another precision.
        scale = torch.tensor(temperature, dtype=torch.float32, device=logits.device)
        with registry.on_logprob_path():
            return logprob.scale_by_temperature(logits.squeeze(0), scale).unsqueeze(0)

    def packed_logprobs(
        self, logits, packed_tokens, cu_seqlens, length: int, *, group, attention_mask, sub_seq_lengths=None, **unused
    ) -> torch.Tensor:
        """Logprob of the token after each token of a packed batch.

        Args:
            logits: [1, T, V / tp] fp32.
            packed_tokens: [1, T] int64.
            cu_seqlens: [B + 1] int32, where each row's tokens lie.
            length: S, of the padded rows.
            group: tensor-parallel process group.
            attention_mask: [B, S], true at the rows' tokens.
            sub_seq_lengths: rows that hold several sequences; not covered.
            unused: vocabulary ranges and chunking, which the op knows.

        Returns:
            [B, S - 1] fp32: at each token that has a successor the successor's logprob, 0.0 elsewhere.
        """
        if sub_seq_lengths is not None:
            raise NotImplementedError("rows of several sequences: pack one sequence per row")
        mask = attention_mask.bool()
        ordinal = mask.long().cumsum(1) - 1
        followed = mask & (ordinal < mask.sum(1, keepdim=True) - 1)
        rows = (cu_seqlens[:-1].long().unsqueeze(1) + ordinal)[followed]
        tp = tensor_parallel(group, self._sequence_parallel)
        with registry.on_logprob_path():
            values = logprob.token_logprob(logits[0].index_select(0, rows), packed_tokens[0][rows + 1], tp=tp, **self._sizes)
            found = values.new_zeros(mask.shape[0], length - 1)
            return found.index_put((followed[:, :-1].nonzero(as_tuple=True)), values)

    def loss_of(self, function):
        """``function`` of logits takes temperature and logprobs with the methods above; what else it computes no logprob depends on."""

        @functools.wraps(function.func)
        def measured(logits):
            with registry.beyond_logprob():
                loss, found = function(logits)
                # Scoring's is a constant, which Megatron's schedule scales in place as it does a loss: one made here is known for one.
                return loss.clone(), found

        return measured
