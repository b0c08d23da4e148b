"""The contract of a checkpoint, from its HF ``config.json``."""

from __future__ import annotations

import json
import math
from pathlib import Path

from isoexec.contract.architectures import REGIONS
from isoexec.contract.canonical import bits64, sha256_hex
from isoexec.contract.checkpoints import check_checkpoint
from isoexec.contract.errors import ContractError
from isoexec.contract.types import ExecutionContract, Numerics

#: Widths of one matrix step on every backend; a leaf of a row-parallel product holds whole steps.
_STEP = 16

#: Entries of an HF config that say who wrote it, or how another program would run it.
_NOT_THE_FUNCTION = ("_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype", "auto_map")


#: Entries of an HF config that are counts or widths, where they are given.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


def read_config(folder) -> dict:
    """The HF config of a checkpoint folder.

    Raises:
        ContractError: there is no such folder, or its ``config.json`` is missing, unreadable or names no architecture.
    """
    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        raise ContractError(f"model {str(folder)!r}: no such folder; expected a checkpoint in HF format")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ContractError(f"model {str(folder)!r}: config.json is missing; expected a checkpoint in HF format") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(f"model {str(folder)!r}: config.json cannot be read: {error}") from None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ContractError(f"model {str(folder)!r}: config.json: architectures: expected one name, found {names!r}")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ContractError(f"model {str(folder)!r}: config.json: text_config: expected an object, found {text!r}")
    for name in _SIZES:
        value = text.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ContractError(f"model {str(folder)!r}: config.json: {name}: expected a positive integer, found {value!r}")
    return config


def contract_for_model(folder, backend: str, **numerics) -> ExecutionContract:
    """A contract with the default constants, fitted to the model's sizes: as many row leaves and expert groups, up to 8, as they allow.

    Args:
        numerics: constants of :class:`Numerics` that are to differ from that.

    Raises:
        ContractError: see :func:`read_config`; or an entry that the model function does not cover, sizes that do not fit each other, a
            width that no number of leaves divides, a constant that is not allowed.
    """
    config = read_config(folder)
    text = config.get("text_config", config)
    where = f"model {str(folder)!r}: config.json: "
    if config["architectures"][0] not in REGIONS:
        raise ContractError(f"{where}architectures: expected one of {', '.join(REGIONS)}, found {config['architectures'][0]}")
    _check_relations(text, where)
    for entries in (text, {"quantization_config": config.get("quantization_config")}):  # a nested file has it outside
        check_checkpoint(config["architectures"][0], entries, where)
    experts = _experts(text)
    groups = combine_groups_for(experts) if experts else Numerics().combine_groups
    constants = Numerics(**({"row_leaves": _row_leaves(text), "combine_groups": groups} | numerics))
    return ExecutionContract(config["architectures"][0], backend, constants, model=model_digest(config))


def _experts(text: dict) -> int | None:
    """Routed experts of a layer, by the name of the family or of the release that wrote the file."""
    return text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts")


def _check_relations(text: dict, where: str) -> None:
    """Refuse sizes that do not fit each other, and floats that are none."""
    for name, divisor in (("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads")):
        if text.get(name) and text.get(divisor) and text[name] % text[divisor]:
            raise ContractError(f"{where}{divisor}: expected a divisor of the {text[name]} of {name}, found {text[divisor]}")
    chosen, experts = text.get("num_experts_per_tok"), _experts(text)
    if chosen and experts and chosen > experts:
        raise ContractError(f"{where}num_experts_per_tok: expected at most the {experts} experts, found {chosen}")
    rope = text.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ContractError(f"{where}rope_parameters: expected an object, found {rope!r}")
    for name, value in (*((n, text.get(n)) for n in ("rms_norm_eps", "rope_theta")), ("rope_parameters.rope_theta", rope.get("rope_theta"))):
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise ContractError(f"{where}{name}: expected a positive number, found {value!r}")


def model_digest(config: dict) -> str:
    """sha256 of what an HF config says about the function that the model computes: everything but who wrote it, and where.

    Floats enter as bit patterns: ``1e-6`` and ``0.000001`` are one value.
    """
    return sha256_hex(_exact({key: value for key, value in config.items() if key not in _NOT_THE_FUNCTION}))


def _exact(value):
    if isinstance(value, float):
        return bits64(value)
    if isinstance(value, dict):
        return {str(key): _exact(item) for key, item in value.items()}
    return [_exact(item) for item in value] if isinstance(value, list) else value


def combine_groups_for(num_experts: int, largest: int = 8) -> int:
    """Contract constant ``combine_groups`` for a model: the largest power of two that divides ``num_experts``, at most ``largest``.

    The ops never shrink the constant themselves, because it bounds the claimed expert-parallel degree.
    """
    groups = 1
    while groups * 2 <= largest and num_experts % (groups * 2) == 0:
        groups *= 2
    return groups


def _row_leaves(config: dict) -> int:
    widths = _row_parallel_widths(config)
    leaves = Numerics().row_leaves
    while leaves > 1 and any(width % (_STEP * leaves) for width in widths.values()):
        leaves //= 2
    for name, width in widths.items():
        if width % (_STEP * leaves):
            raise ContractError(f"{name}: {width} is not a multiple of {_STEP}, which row-parallel products need")
    return leaves


def _row_parallel_widths(config: dict) -> dict[str, int]:
    """K of every row-parallel product, by the config entries it comes from."""

    def size(name: str) -> int:
        if not config.get(name):
            raise ContractError(f"config.json: {name} is missing; expected a positive integer")
        return config[name]

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    if config.get("kv_lora_rank"):  # latent attention: what a head puts out is as wide as its values
        widths = {"num_attention_heads * v_head_dim": heads * size("v_head_dim")}
    else:
        widths = {"num_attention_heads * head_dim": heads * (config.get("head_dim") or hidden // heads)}
    for name in ("intermediate_size", "shared_expert_intermediate_size"):
        if config.get(name):
            widths[name] = config[name]
    if config.get("n_shared_experts"):
        widths["n_shared_experts * moe_intermediate_size"] = config["n_shared_experts"] * size("moe_intermediate_size")
    if config.get("linear_num_value_heads"):
        widths["linear_num_value_heads * linear_value_head_dim"] = config["linear_num_value_heads"] * size("linear_value_head_dim")
    return widths
