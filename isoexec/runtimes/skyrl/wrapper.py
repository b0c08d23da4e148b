"""SkyRL's model wrapper with the logprobs that the engine samples with."""

from __future__ import annotations

import functools

import torch
from megatron.core import parallel_state
from skyrl.backends.skyrl_train.distributed.megatron.model_utils import vocab_parallel_entropy
from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper

from isoexec.contract import ExecutionContract
from isoexec.ops import logprob
from isoexec.ops._core import registry
from isoexec.runtimes.megatron.modules import tensor_parallel
from isoexec.runtimes.megatron.scoring import hidden_scorer, in_place_of_logits, scalar

_ENTROPY_BYTES = 32 << 20  # of logits whose entropies are taken at once: upstream's form makes copies of them


class ContractWrapper(MegatronModelWrapper):
    """Takes logprobs with isoexec's ops, and from hidden states: no [tokens, vocabulary] tensor is made, in either direction.

    An entropy in the loss needs the logits for its gradient: with ``trainer.algorithm.use_entropy_loss`` the model gives them, and the
    logprobs, of the same bits, are taken from them.

    Args:
        contract: of this process.
        vocab_size: entries that exist; a model may hold padding beyond.
        sequence_parallel: as the model has it.
    """

    def __init__(self, *args, contract: ExecutionContract, vocab_size: int, sequence_parallel: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self._sizes = {"vocab_size": vocab_size, "vocab_block": contract.numerics.vocab_block}
        group = parallel_state.get_tensor_model_parallel_group()
        self._tp = tensor_parallel(group, sequence_parallel)
        self._score = hidden_scorer(contract, vocab_size, group, sequence_parallel)
        self._makes_logits = self.cfg.algorithm.use_entropy_loss

    def forward(self, *args, **kwargs) -> torch.Tensor:
        with registry.executing("trainer_score"):
            return super().forward(*args, **kwargs)

    def forward_backward_mini_batch(self, *args, **kwargs) -> list[dict]:
        with registry.executing("trainer_forward"):
            return super().forward_backward_mini_batch(*args, **kwargs)

    def run_model(self, model, batch, temperature: float, *args, **kwargs) -> torch.Tensor:
        """What the methods below are given: [1, T, 1] fp32, the logprob of each packed token's successor; in training [1, T, 2], its
        distribution's entropy, without a gradient, beside it. With an entropy in the loss: [1, T, V / tp] fp32 logits."""
        if self._makes_logits:
            return model(*args, **kwargs)
        instead = functools.partial(self._of_hidden, batch["packed_targets"][0].roll(-1), temperature)
        return model(*args, **kwargs, output_processor=in_place_of_logits(instead))

    def _of_hidden(self, tokens: torch.Tensor, temperature: float, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Every row, also the last of a sequence, of which nothing is read: the products are then those of the whole pack's logits.
        if registry.current_case() == "trainer_score":
            return self._score(x, weight, tokens, temperature)[None, :, None]
        entropies: list[torch.Tensor] = []
        values = self._score(x, weight, tokens, temperature, functools.partial(_add_entropies, entropies))
        with registry.beyond_logprob():
            return torch.stack([values, torch.cat(entropies)], -1).unsqueeze(0)

    def scale_logits(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """[1, T, V / tp] fp32 logits / temperature; what is made of hidden states is scaled."""
        if not self._makes_logits:
            return logits
        with registry.on_logprob_path():
            return logprob.scale_by_temperature(logits.squeeze(0), scalar(temperature, logits.device)).unsqueeze(0)

    def packed_logprobs(
        self, found, packed_tokens, cu_seqlens, length: int, *, group, attention_mask, sub_seq_lengths=None, **unused
    ) -> torch.Tensor:
        """Logprob of the token after each token of a packed batch.

        Args:
            found: of :meth:`run_model`, at the temperature.
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
        with registry.on_logprob_path():
            values = found[0].index_select(0, rows)
            if self._makes_logits:
                values = logprob.token_logprob(values, packed_tokens[0][rows + 1], tp=self._tp, **self._sizes)
            else:
                values = values[:, 0]
            return values.new_zeros(mask.shape[0], length - 1).index_put((followed[:, :-1].nonzero(as_tuple=True)), values)

    def packed_entropy(self, found, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Upstream's mean over the response tokens, of entropies that were taken while the logits were there.

        Raises:
            NotImplementedError: a loss that the configuration does not name wants their gradient.
        """
        if not self._makes_logits:
            if torch.is_grad_enabled():
                raise NotImplementedError("an entropy in the loss of one call: set trainer.algorithm.use_entropy_loss for the run")
            kwargs["entropy_of"] = lambda each: each[..., 1]
        return super().packed_entropy(found, *args, **kwargs)

    def loss_of(self, function):
        """``function`` of logits takes temperature and logprobs with the methods above; what else it computes no logprob depends on."""

        @functools.wraps(function.func)
        def measured(logits):
            with registry.beyond_logprob():
                loss, found = function(logits)
                # Scoring's is a constant, which Megatron's schedule scales in place as it does a loss: one made here is known for one.
                return loss.clone(), found

        return measured


def _add_entropies(found: list[torch.Tensor], logits: torch.Tensor) -> None:
    """Upstream's entropies of a tile of the logits."""
    step = max(_ENTROPY_BYTES // (4 * logits.shape[1]), 1)
    with registry.beyond_logprob(), torch.no_grad():
        found += [vocab_parallel_entropy(part) for part in logits.split(step)]
