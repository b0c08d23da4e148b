"""Makes a start checkpoint larger without changing what it computes, up to rounding: weights of a real size, answers that get rewards.

    python recipes/start/widen.py recipes/start/dense FOLDER --hidden 16 --mlp 32 --layers 12
    python recipes/start/widen.py recipes/start/hybrid-moe FOLDER --hidden 16 --mlp 8 --layers 8

Hidden channels are repeated ``--hidden`` times, those of the MLPs and experts ``--mlp`` times, both powers of two, so that the shares of a sum
are exact; added layers, in the checkpoint's pattern, add zero to the residual stream. The first example gives 135 tensors, 1.15 GiB, the second
317 tensors, 0.50 GiB: what the runs on a GPU in docs/training.md train.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MODEL = "model.safetensors"
ARCHITECTURES = (["Qwen3ForCausalLM"], ["Qwen3_5MoeForCausalLM"])
#: Of one head each, or of the heads' channels, which stay as they are.
_OF_HEADS = ("q_norm.weight", "k_norm.weight", "linear_attn.norm.weight", "conv1d.weight", "A_log", "dt_bias")
#: What adds to the residual stream.
_ADDING = ("o_proj", "out_proj", "down_proj")
_MLP_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def widened(name: str, weight: torch.Tensor, hidden: int, mlp: int) -> torch.Tensor:
    """One tensor of a Qwen3 or Qwen3.5 checkpoint with its channels repeated; what reads repeated channels takes its share of each."""
    if name.endswith(_OF_HEADS):
        return weight
    if weight.dim() == 1:
        return weight.repeat(hidden)
    kind = name.split(".")[-2]
    rows = hidden if kind in _ADDING else mlp if kind in ("gate_proj", "up_proj") else 1
    columns = {"o_proj": 1, "out_proj": 1, "down_proj": mlp}.get(kind, hidden)
    shares = 1 if kind == "embed_tokens" else columns
    return weight.repeat(rows, columns) / shares


def widen(source: Path, folder: Path, hidden: int, mlp: int, layers: int) -> None:
    """Write a larger checkpoint than ``source`` into ``folder``.

    Raises:
        SystemExit: ``source`` is no dense Qwen3 or Qwen3.5 MoE with a head of its own, a factor is no power of two, or ``layers`` are fewer
            than it has.
    """
    config = json.loads((source / "config.json").read_text())
    if config["architectures"] not in ARCHITECTURES or config["tie_word_embeddings"]:
        raise SystemExit(f"{source}: expected {' or '.join(a for a, in ARCHITECTURES)} whose head is not its embedding")
    old = config["num_hidden_layers"]
    types = config.get("layer_types") or ["full_attention"] * old
    if any(factor < 1 or factor & (factor - 1) for factor in (hidden, mlp)) or layers < old:
        raise SystemExit(f"expected powers of two and at least {old} layers, found --hidden {hidden} --mlp {mlp} --layers {layers}")
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MODEL))
    config |= {name: config[name] * mlp for name in _MLP_SIZES if name in config}
    config |= {"hidden_size": config["hidden_size"] * hidden, "num_hidden_layers": layers}
    config["layer_types"] = [types[layer % old] for layer in range(layers)]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: widened(name, weight, hidden, mlp).contiguous() for name, weight in load_file(source / MODEL).items()}
    for layer in range(old, layers):
        like = f"model.layers.{types.index(types[layer % old])}."  # the first of its kind
        for name in [name for name in tensors if name.startswith(like)]:
            adds = name.split(".")[-2] in _ADDING
            tensors[name.replace(like, f"model.layers.{layer}.")] = torch.zeros_like(tensors[name]) if adds else tensors[name].clone()
    save_file(tensors, folder / MODEL, {"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    for name in ("hidden", "mlp", "layers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    widen(**vars(parser.parse_args()))
