"""Token-id prompts: nothing is tokenised again on the way, so token in is token out (retokenised text is another sequence)."""

from __future__ import annotations

import random

#: Lengths at the edges of blocks, tiles and chunks; the first eight serve the one-at-a-time setting.
EDGE_LENGTHS = (1, 63, 64, 65, 127, 128, 129, 300, 2, 3, 15, 16, 17, 31, 32, 33, 255, 256, 257)
LONGEST = 300
#: Tokens that every third prompt shares from its start, so that a prefix cache has something to find.
STEM_LENGTH = 140


def make_prompts(count: int, vocab_size: int, *, seed: int, first_id: int = 3) -> list[list[int]]:
    """``count`` prompts of random ids in [first_id, vocab_size), with 1 to 300 tokens.

    The lengths of :data:`EDGE_LENGTHS` come first, as far as ``count`` reaches; the others are random. Every third prompt starts
    with the same stem, and each prompt is different from the others.
    """
    rng = random.Random(seed)
    lengths = [*EDGE_LENGTHS[:count], *(rng.randint(1, LONGEST) for _ in range(count - len(EDGE_LENGTHS)))]
    stem = _ids(rng, STEM_LENGTH, first_id, vocab_size)
    prompts, seen = [], set()
    for index, length in enumerate(lengths):
        prompt = None
        while prompt is None or tuple(prompt) in seen:
            shared = stem[: length - 1] if index % 3 == 2 else []
            prompt = shared + _ids(rng, length - len(shared), first_id, vocab_size)
        seen.add(tuple(prompt))
        prompts.append(prompt)
    return prompts


def request_seeds(prompts: list[list[int]], *, seed: int) -> list[int]:
    """One sampling seed for each prompt: what is sampled must not depend on the order or company of requests."""
    rng = random.Random(seed)
    return [rng.randrange(2**31) for _ in prompts]


def packings(lengths: list[int], *, tokens: int, seed: int) -> list[list[int]]:
    """Shuffle sequences and fill micro-batches of at most ``tokens`` tokens (a longer sequence gets its own).

    Args:
        lengths: tokens of each sequence, prompt and continuation together.
        tokens: most tokens in a micro-batch.
        seed: of the shuffle; the order never is the engine's.

    Returns:
        Indices of the sequences of each micro-batch.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    packs, room = [], 0
    for index in order:
        if not packs or lengths[index] > room:
            packs.append([])
            room = tokens
        packs[-1].append(index)
        room -= lengths[index]
    return packs


def _ids(rng: random.Random, length: int, first_id: int, vocab_size: int) -> list[int]:
    return [rng.randrange(first_id, vocab_size) for _ in range(length)]
