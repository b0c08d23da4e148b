"""A Qwen3 model of random weights: one decode step and one packed pass, from token ids to logprobs, written with isoexec's ops.

What an engine runs for a batch of single tokens, and a trainer for packed sequences, without either: the product's model functions on
static buffers, small enough to be captured by hand. Any device; :data:`TINY` is for a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from isoexec.contract import Numerics
from isoexec.models import qwen3
from isoexec.ops import attention, embedding, logprob, matmul, rope
from isoexec.ops._core import registry


class Sizes(NamedTuple):
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_size: int
    width: int
    vocabulary: int
    batch: int
    context: int  # tokens of each sequence, the new one among them
    page: int = 32


#: Qwen3 8B, 64 sequences of 2,048 tokens.
QWEN3_8B = Sizes(36, 4096, 32, 8, 128, 12288, 151936, 64, 2048)
TINY = Sizes(3, 128, 4, 2, 32, 256, 256, 4, 40)


class Model:
    """Weights of ``sizes`` on ``device``, and a pass over token rows: :meth:`run` reads ``ids`` and leaves ``logprobs``."""

    case: str
    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64

    def __init__(self, sizes: Sizes, device, seed: int = 3):
        self.sizes, self.numerics = sizes, Numerics()
        s, self._generator, self._device = sizes, torch.Generator(device).manual_seed(seed), device
        self.embedding, self.head, self.final = (
            self.random(s.vocabulary, s.hidden, scale=1.0),
            self.random(s.vocabulary, s.hidden),
            self.norm(s.hidden),
        )
        queries, keys = s.heads * s.head_size, s.key_heads * s.head_size

        def split(qkv):
            q, k, v = qkv.split((queries, keys, keys), 1)
            return q.unflatten(1, (s.heads, s.head_size)), *(x.unflatten(1, (s.key_heads, s.head_size)) for x in (k, v))

        random, norm = self.random, self.norm
        self.layers = [
            qwen3.Qwen3Layer(
                norm(s.hidden), random(queries + 2 * keys, s.hidden), split, norm(s.head_size), norm(s.head_size),
                random(s.hidden, queries), norm(s.hidden), random(2 * s.width, s.hidden), random(s.hidden, s.width), 1e-6,
            )
            for _ in range(s.layers)
        ]  # fmt: skip
        self.temperature, self.logprobs = torch.full((), 0.7, device=device), None

    def random(self, *shape, scale=0.02):
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.bfloat16) * scale

    def norm(self, n):
        return 1 + self.random(n)

    def draw(self, count):
        return torch.randint(self.sizes.vocabulary, (count,), generator=self._generator, device=self._device)

    def run(self, begin=lambda: None) -> None:
        """``begin`` is called before the first op, as a runtime tells an observer that a pass begins."""
        s, numerics = self.sizes, self.numerics
        with torch.no_grad(), registry.executing(self.case):
            begin()
            table = rope.rope_table(self.positions, s.head_size, 1e6)
            x, residual = embedding.embedding(self.ids, self.embedding), None
            for index, layer in enumerate(self.layers):
                with registry.in_layer(index):
                    x, residual = qwen3.decoder_layer(x, residual, layer, table, self._attend(index), numerics)
            logits = matmul.lm_head(qwen3.final_norm(x, residual, self.final, 1e-6), self.head)
            self.logprobs = self._logprobs(logprob.scale_by_temperature(logits, self.temperature))

    @property
    def _vocabulary(self) -> dict:
        return {"vocab_size": self.sizes.vocabulary, "vocab_block": self.numerics.vocab_block}


class DecodeStep(Model):
    """A token of each of ``batch`` sequences; ``logprobs`` [batch, vocabulary] fp32."""

    case = "engine_decode"

    def __init__(self, sizes: Sizes, device):
        super().__init__(sizes, device)
        s, pages = sizes, -(-sizes.context // sizes.page)
        self.caches = [
            [self.random(s.batch * pages, s.page, s.key_heads, s.head_size, scale=1.0) for _ in range(2)] for _ in range(s.layers)
        ]
        self.table = torch.arange(s.batch * pages, dtype=torch.int32, device=device).view(s.batch, pages)
        self.ids = self.draw(s.batch)
        self.positions = torch.full((s.batch,), s.context - 1, dtype=torch.int64, device=device)
        self.slots = self.table[:, (s.context - 1) // s.page].long() * s.page + (s.context - 1) % s.page
        self.lengths = torch.full((s.batch,), s.context, dtype=torch.int32, device=device)
        self.starts = torch.arange(s.batch + 1, dtype=torch.int32, device=device)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(sequence, position) of the batch, on the CPU."""
        return torch.arange(self.sizes.batch), torch.full((self.sizes.batch,), self.sizes.context - 1)

    def _attend(self, index: int):
        s, (keys, values) = self.sizes, self.caches[index]

        def attend(q, k, v):
            attention.write_cache(k, v, keys, values, self.slots)
            return attention.paged(
                q, keys, values, self.table, self.lengths, self.starts, scale=s.head_size**-0.5, kv_block=self.numerics.kv_block, longest=1
            )

        return attend

    def _logprobs(self, scaled):
        return logprob.log_softmax(scaled, **self._vocabulary)


class PackedPass(Model):
    """``batch`` sequences of ``context`` tokens; ``logprobs`` [batch * context] fp32 of the tokens that follow."""

    case = "trainer_score"

    def __init__(self, sizes: Sizes, device):
        super().__init__(sizes, device)
        s = sizes
        self.ids = self.draw(s.batch * s.context)
        self.positions = torch.arange(s.context, device=device).repeat(s.batch)
        self.bounds = torch.arange(s.batch + 1, dtype=torch.int32, device=device) * s.context

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(sequence, position) of the batch, on the CPU."""
        return torch.arange(self.sizes.batch).repeat_interleave(self.sizes.context), self.positions.cpu()

    def _attend(self, index: int):
        s = self.sizes

        def attend(q, k, v):
            return attention.varlen(q, k, v, self.bounds, scale=s.head_size**-0.5, kv_block=self.numerics.kv_block, longest=s.context)

        return attend

    def _logprobs(self, scaled):
        return logprob.token_logprob(scaled, self.ids.roll(-1), **self._vocabulary)
