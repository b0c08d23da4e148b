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

    return Qwen3ForCausalLM, Qwen3Config(**(_COMMON_SIZES | sizes))


def _qwen3_moe(sizes: dict):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**(_COMMON_SIZES | _EXPERT_SIZES | dict(norm_topk_prob=True) | sizes))


def _glm4_moe_lite(sizes: dict):
    from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

    common = {name: size for name, size in _COMMON_SIZES.items() if name != "head_dim"}
    return Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig(**(common | _LATENT_SIZES | sizes))


def _text(sizes: dict, family: str):
    import transformers

    config = getattr(transformers, f"{family}TextConfig")(**_text_sizes(sizes, family))
    return getattr(transformers, f"{family}ForCausalLM"), config


def _with_vision(sizes: dict, family: str):
    import transformers

    text = _text_sizes(sizes, family)
    outside = {name: text["vocab_size"] + i for i, name in enumerate(_VISION_TOKENS)}  # no text contains them
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=_VISION_SIZES | dict(out_hidden_size=text["hidden_size"]),
        tie_word_embeddings=text["tie_word_embeddings"],
        **outside,
    )
    return getattr(transformers, f"{family}ForConditionalGeneration"), config


def _text_sizes(sizes: dict, family: str) -> dict:
    if family == "Qwen3_5":
        return _COMMON_SIZES | _HYBRID_SIZES | sizes
    common = {name: size for name, size in _COMMON_SIZES.items() if name != "intermediate_size"}
    return common | _HYBRID_SIZES | _EXPERT_SIZES | dict(shared_expert_intermediate_size=128) | sizes


_VISION_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

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

_EXPERT_SIZES = dict(num_experts=8, num_experts_per_tok=4, moe_intermediate_size=64)  # fewer than 4 terms of a sum hide a wrong order
_LATENT_SIZES = dict(
    num_key_value_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=48,
    qk_rope_head_dim=16,
    v_head_dim=32,  # narrower than queries and keys, whose size the cache has
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    n_shared_experts=2,
    routed_scaling_factor=1.8,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
)
_HYBRID_SIZES = dict(
    mamba_ssm_dtype="float32",
    head_dim=64,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_interleaved=True, mrope_section=[3, 3, 2]
    ),
)
_VISION_SIZES = dict(depth=1, hidden_size=64, intermediate_size=64, num_heads=4, out_hidden_size=128, num_position_embeddings=64)

#: HF architecture name -> function from size overrides to (model class, config). Every fourth layer of a hybrid attends. The
#: ``ForConditionalGeneration`` ones carry a vision tower, as the published checkpoints do; sizes are those of the text model.
ARCHITECTURES: dict[str, Callable] = {
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3_5ForCausalLM": lambda sizes: _text(sizes, "Qwen3_5"),
    "Qwen3_5ForConditionalGeneration": lambda sizes: _with_vision(sizes, "Qwen3_5"),
    "Qwen3_5MoeForCausalLM": lambda sizes: _text(sizes, "Qwen3_5Moe"),
    "Qwen3_5MoeForConditionalGeneration": lambda sizes: _with_vision(sizes, "Qwen3_5Moe"),
    "Glm4MoeLiteForCausalLM": _glm4_moe_lite,
}

#: Tensors that stay fp32: exp(A_log) of a bf16 number is another decay, and a rounded bias of the router chooses other experts.
FP32_PARAMETERS = ("A_log", "dt_bias", "e_score_correction_bias")


def make_checkpoint(folder, architecture: str = "Qwen3ForCausalLM", *, seed: int = 0, **size_overrides) -> Path:
    """Write a random bf16 checkpoint in HF format: config, ``model.safetensors``, generation config and a byte-level tokenizer.

    Args:
        folder: created if it does not exist; files of an earlier checkpoint are overwritten.
        architecture: a key of :data:`ARCHITECTURES`.
        seed: same seed and sizes give the same weights.
        size_overrides: entries of the HF (text) config, e.g. ``num_hidden_layers=2``.

    Returns:
        ``folder`` as a path.

    Raises:
        ContractError: unknown architecture, a vocabulary too small for the tokenizer, or an entropy that cannot be reached.
    """
    if architecture not in ARCHITECTURES:
        raise ContractError(f"architecture {architecture!r}: make_checkpoint knows {', '.join(ARCHITECTURES)}")
    folder = Path(folder)
    model_class, config = ARCHITECTURES[architecture](size_overrides)
    text_config = config.get_text_config()
    tokenizer = _tokenizer(text_config.vocab_size, text_config.max_position_embeddings)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # entries that keep the class's own initialisation
        model = model_class(config).eval()
    with torch.no_grad():
        _spread_weights(model, generator)
        _scale_output(model, generator)
    _round_parameters(model)
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
        if "RMSNorm" in type(module).__name__:  # around the class's own start: 1, or 0 where zero-centred
            module.weight.add_(torch.empty_like(module.weight).uniform_(-0.5, 0.5, generator=generator))
        if hasattr(module, "A_log"):  # heads that forget within a few tokens and heads that remember hundreds
            module.A_log.uniform_(-6, 0, generator=generator)
            module.dt_bias.uniform_(-1, 1, generator=generator)
        if hasattr(module, "e_score_correction_bias"):  # enough to change which experts a token takes
            module.e_score_correction_bias.uniform_(-0.2, 0.2, generator=generator)


def _round_parameters(model) -> None:
    """bf16 where the published checkpoints are bf16."""
    for name, parameter in model.named_parameters():
        if not name.endswith(FP32_PARAMETERS):
            parameter.data = parameter.data.to(torch.bfloat16)


def _scale_output(model, generator) -> None:
    """Scale the last factor before the logits so that the mean entropy is :data:`TARGET_ENTROPY`."""
    vocabulary, length = model.config.get_text_config().vocab_size, 64
    tokens = torch.randint(len(_SPECIAL_TOKENS), vocabulary, (8, length), generator=generator)
    logits = model(tokens).logits.float()
    low, high = 1e-3, 1e3
    for _ in range(60):  # entropy falls as the scale grows
        middle = math.sqrt(low * high)
        if mean_entropy((logits * middle).log_softmax(-1)) > TARGET_ENTROPY:
            low = middle
        else:
            high = middle
    if model.config.get_text_config().tie_word_embeddings:
        norm = getattr(model.base_model, "language_model", model.base_model).norm
        start = 1 if "Qwen3_5" in type(norm).__name__ else 0  # zero-centred: the factor is 1 + w
        norm.weight.copy_((start + norm.weight) * high - start)  # the embedding also feeds the first layer
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
