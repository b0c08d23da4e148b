"""Which sequence and position each row of a step is, from the model runner's own account of its batch."""

from __future__ import annotations

import torch


class StepRows:
    """Rows of the steps that serve some requests.

    Args:
        runner: vLLM's model runner.
        first: request number of sequence 0. vLLM numbers requests in the order of submission, and adds a random part to the name.
    """

    def __init__(self, runner, first: int):
        self._runner, self._first = runner, first
        self._sampling = False

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(sequence, position) [T] int64 of the rows that the model is about to compute."""
        self._sampling = True
        owner, position = self._batch()
        sequence = torch.tensor([self._sequence(name) for name in self._runner.input_batch.req_ids], dtype=torch.int64)
        return sequence[owner], position

    def sampled(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(sequence, position) of each request's last row, which has logits; sequence -1 where what is drawn from them is discarded.

        None after the step has sampled: logits of prompt tokens follow, in rows of their own.
        """
        if not self._sampling:
            return None
        owner, position = self._batch()
        last = torch.bincount(owner).cumsum(0) - 1
        requests = [self._runner.requests[name] for name in self._runner.input_batch.req_ids]
        known = torch.tensor([request.num_tokens for request in requests])
        sequence = torch.tensor([self._sequence(name) for name in self._runner.input_batch.req_ids], dtype=torch.int64)
        return torch.where(position[last] + 1 < known, -1, sequence), position[last]

    def done(self) -> None:
        """The step has sampled."""
        self._sampling = False

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        count = self._runner.input_batch.num_reqs
        bounds = torch.from_numpy(self._runner.query_start_loc.np[: count + 1].astype("int64"))
        owner = torch.arange(count).repeat_interleave(bounds.diff())
        past = torch.from_numpy(self._runner.input_batch.num_computed_tokens_cpu[:count].astype("int64"))
        return owner, torch.arange(int(bounds[-1])) - bounds[owner] + past[owner]

    def _sequence(self, name: str) -> int:
        return int(name.partition("-")[0]) - self._first
