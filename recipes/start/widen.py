"""Makes a dense start checkpoint larger without changing what it computes, up to rounding: weights of a real size, answers that get rewards.

    python recipes/start/widen.py recipes/start/dense FOLDER --hidden 16 --mlp 32 --layers 12

Hidden channels are repeated ``--hidden`` times, those of the MLPs ``--mlp`` times, both powers of two, so that the shares of a sum are exact;
added layers add zero to the residual stream. The example gives 135 tensors, 1.15 GiB: what the run on a GPU in docs/training.md trains.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MODEL = "model.safetensors"


def widened(name: str, weight: torch.Tensor, hidden: int, mlp: int) -> torch.Tensor:
    """One tensor of a Qwen3 checkpoint with its channels repeated; what reads repeated channels takes its share of each."""
    kind = name.split(".")[-2]
    if kind in ("q_norm", "k_norm"):
        return weight
    if weight.dim() == 1:
        return weight.repeat(hidden)
    rows = {"o_proj": hidden, "gate_proj": mlp, "up_proj": mlp, "down_proj": hidden}.get(kind, 1)
    columns = {"o_proj": 1, "down_proj": mlp}.get(kind, hidden)
    shares = 1 if kind == "embed_tokens" else columns
    return weight.repeat(rows, columns) / shares


def widen(source: Path, folder: Path, hidden: int, mlp: int, layers: int) -> None:
    """Write a larger checkpoint than ``source`` into ``folder``.

    Raises:
        SystemExit: ``source`` is no dense Qwen3 with a head of its own, a factor is no power of two, or ``layers`` are fewer than it has.
    """
    config = json.loads((source / "config.json").read_text())
    old = config["num_hidden_layers"]
    if config["architectures"] != ["Qwen3ForCausalLM"] or config["tie_word_embeddings"]:
        raise SystemExit(f"{source}: expected Qwen3ForCausalLM whose head is not its embedding")
    if any(factor < 1 or factor & (factor - 1) for factor in (hidden, mlp)) or layers < old:
        raise SystemExit(f"expected powers of two and at least {old} layers, found --hidden {hidden} --mlp {mlp} --layers {layers}")
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MODEL))
    config |= {"hidden_size": config["hidden_size"] * hidden, "intermediate_size": config["intermediate_size"] * mlp}
    config |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: widened(name, weight, hidden, mlp).contiguous() for name, weight in load_file(source / MODEL).items()}
    for name, weight in [(name, weight) for name, weight in tensors.items() if name.startswith("model.layers.0.")]:
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        for layer in range(old, layers):
            tensors[name.replace("layers.0.", f"layers.{layer}.")] = torch.zeros_like(weight) if adds else weight.clone()
    save_file(tensors, folder / MODEL, {"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    for name in ("hidden", "mlp", "layers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    widen(**vars(parser.parse_args()))
