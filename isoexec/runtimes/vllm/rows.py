"""Digests of whole log-probability rows, carried through vLLM in place of the rows.

A request with ``logprobs=-1`` has vLLM hand every entry of the vocabulary over as Python numbers: gigabytes for a vocabulary of 151,936.
A forward hook of the sampler replaces them, behind the sampled token, by the words of the row's digest: as token ids, which vLLM
routes, discards and orders as it does with real ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from isoexec.ops._core.bits import row_digests

_WORDS = 2  # int32; a digest has 64 bits


@contextlib.contextmanager
def carried_digests(sampler: torch.nn.Module, vocab_size: int) -> Iterator[None]:
    """Inside, ``sampler`` (vLLM's ``Sampler``) returns digests instead of whole rows; what was not asked for whole stays as it is."""

    def replace(_, __, output):
        tensors = output.logprobs_tensors
        if tensors is None or tensors.logprobs.shape[-1] != vocab_size + 1:  # the sampled token, then all by size
            return None
        ids = tensors.logprob_token_ids
        rows = torch.empty_like(tensors.logprobs[:, 1:]).scatter_(1, ids[:, 1:].long(), tensors.logprobs[:, 1:])
        words = torch.tensor([to_words(digest) for digest in row_digests(rows)], dtype=ids.dtype, device=ids.device).view(-1, _WORDS)
        carried = tensors._replace(
            logprob_token_ids=torch.cat((ids[:, :1], words), 1),
            logprobs=torch.nn.functional.pad(tensors.logprobs[:, :1], (0, _WORDS)),
        )
        return dataclasses.replace(output, logprobs_tensors=carried)

    handle = sampler.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def to_words(digest: str) -> list[int]:
    """Two signed 32-bit words of a digest of 16 hexadecimal digits."""
    raw = bytes.fromhex(digest)
    return [int.from_bytes(raw[at : at + 4], "little", signed=True) for at in (0, 4)]


def from_words(words: list[int]) -> str:
    """Inverse of :func:`to_words`.

    Raises:
        ValueError: not two words; vLLM returned something else than this module's hook gave it.
    """
    if len(words) != _WORDS:
        raise ValueError(f"{len(words)} words behind a sampled token, expected the {_WORDS} of a row digest")
    return b"".join(word.to_bytes(4, "little", signed=True) for word in words).hex()
