"""Prompts without an end, in an order that a seed decides and a position resumes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from isoexec.runtimes.skyrl.config import ConfigError


class PromptStream:
    """Batches of prompts, epoch after epoch, each epoch in an order of its own. Its state is one number.

    Stands where SkyRL has a dataloader. Dynamic sampling may take several batches in a step; a stream that ends would end the run early.

    Args:
        dataset: SkyRL ``PromptDataset``.
        batch_size: prompts in a batch.
        seed: of the order.

    Raises:
        ConfigError: fewer prompts than a batch holds.
    """

    def __init__(self, dataset, batch_size: int, seed: int):
        if len(dataset) < batch_size:
            raise ConfigError(
                f"data.train_data: expected at least trainer.train_batch_size = {batch_size} prompts of at most trainer.max_prompt_length "
                f"tokens, found {len(dataset)}"
            )
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self.taken = 0

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._dataset) // self._batch_size

    def __iter__(self) -> Iterator[list[dict]]:
        while True:
            epoch, index = divmod(self.taken, len(self))
            order = list(range(len(self._dataset)))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self.taken += 1  # before the batch is used: a checkpoint taken within its step resumes with the next
            batch = self._dataset.collate_fn([self._dataset[i] for i in order[index * self._batch_size :][: self._batch_size]])
            for prompt in batch:  # a prompt that a step meets in two epochs is two groups
                prompt["uid"] = f"{prompt['uid']}@{epoch}"
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Position, as JSON."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position."""
        self.taken = state["taken"]
