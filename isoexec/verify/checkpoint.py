"""Small HF-format checkpoints with random weights that make numeric differences visible.

The usual initialisation of a small model gives near-uniform next-token distributions, whose logprobs hardly move when a kernel changes.
Here the matrices keep the variance of their input, norm weights are spread around their neutral value, and the output layer is
scaled until the next-token distributions hold :data:`TARGET_ENTROPY` nats on average.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import torch

from isoexec.contract import ContractError

#: Mean entropy, in nats, of the next-token distributions of a made checkpoint.
TARGET_ENTROPY = 3.5
#: Range in which every measured mean must lie; outside, differences hide (near uniform) or vanish (near one-hot).
ENTROPY_RANGE = (2.0, 5.0)

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _qwen3(sizes: dict):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM, Qwen3Config(**sizes)


_COMMON_SIZES = dict(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
)

#: HF architecture name -> function from sizes to (model class, config).
ARCHITECTURES: dict[str, Callable] = {"Qwen3ForCausalLM": _qwen3}


def make_checkpoint(folder, architecture: str = "Qwen3ForCausalLM", *, seed: int = 0, **size_overrides) -> Path:
    """Write a random bf16 checkpoint in HF format: config, ``model.safetensors``, generation config and a byte-level tokenizer.

    Args:
        folder: created if it does not exist; files of an earlier checkpoint are overwritten.
        architecture: a key of :data:`ARCHITECTURES`.
        seed: same seed and sizes give the same weights.
        size_overrides: entries of the HF config, e.g. ``num_hidden_layers=2``.

    Returns:
        ``folder`` as a path.

    Raises:
        ContractError: unknown architecture, a vocabulary too small for the tokenizer, or an entropy that cannot be reached.
    """
    if architecture not in ARCHITECTURES:
        raise ContractError(f"architecture {architecture!r}: make_checkpoint knows {', '.join(ARCHITECTURES)}")
    folder = Path(folder)
    model_class, config = ARCHITECTURES[architecture](_COMMON_SIZES | size_overrides)
    tokenizer = _tokenizer(config.vocab_size, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # entries that keep the class's own initialisation
        model = model_class(config).eval()
    with torch.no_grad():
        _spread_weights(model, generator)
        _scale_output(model, generator)
    model = model.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def mean_entropy(log_probabilities: torch.Tensor) -> float:
    """Mean entropy in nats of the distributions in the last dimension of ``log_probabilities``."""
    return -(log_probabilities.exp() * log_probabilities).sum(-1).mean().item()


def _spread_weights(model, generator) -> None:
    embedding = model.get_input_embeddings().weight
    for parameter in model.parameters():
        if parameter is embedding:
            parameter.normal_(generator=generator)
        elif parameter.dim() >= 2:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # around the class's own start: 1, or 0 where zero-centred
            module.weight.add_(torch.empty_like(module.weight).uniform_(-0.5, 0.5, generator=generator))


def _scale_output(model, generator) -> None:
    """Scale the last factor before the logits so that the mean entropy is :data:`TARGET_ENTROPY`."""
    vocabulary, length = model.config.vocab_size, 64
    tokens = torch.randint(len(_SPECIAL_TOKENS), vocabulary, (8, length), generator=generator)
    logits = model(tokens).logits.float()
    low, high = 1e-3, 1e3
    for _ in range(60):  # entropy falls as the scale grows
        middle = math.sqrt(low * high)
        if mean_entropy((logits * middle).log_softmax(-1)) > TARGET_ENTROPY:
            low = middle
        else:
            high = middle
    if model.config.tie_word_embeddings:
        model.base_model.norm.weight.mul_(high)  # the embedding also feeds the first layer
    else:
        model.get_output_embeddings().weight.mul_(high)
    entropy = mean_entropy(model(tokens).logits.float().log_softmax(-1))
    if not ENTROPY_RANGE[0] <= entropy <= ENTROPY_RANGE[1]:
        raise ContractError(
            f"make_checkpoint: mean entropy {entropy:.2f} nats, expected {ENTROPY_RANGE}; "
            f"a vocabulary of {vocabulary} may be too small to hold it"
        )


def _tokenizer(vocab_size: int, max_length: int):
    """Byte-level BPE whose merges are pairs of characters, letters first: every id decodes, and nothing is trained or fetched."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (not c.isascii(), not c.islower(), c))
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL_TOKENS, *alphabet))}
    if vocab_size < len(vocabulary):
        raise ContractError(f"make_checkpoint: vocab_size {vocab_size}, expected at least {len(vocabulary)} for a byte-level tokenizer")
    merges = []
    pairs = itertools.product(range(len(alphabet)), repeat=2)
    for a, b in sorted(pairs, key=max)[: vocab_size - len(vocabulary)]:
        merges.append((alphabet[a], alphabet[b]))
        vocabulary[alphabet[a] + alphabet[b]] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, start, end = _SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        extra_special_tokens=[start],
        model_max_length=max_length,
        chat_template=_CHAT_TEMPLATE,
    )
