"""A start checkpoint made larger computes what it did."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

START = Path(__file__).parents[2] / "recipes" / "start"
widen = runpy.run_path(str(START / "widen.py"))["widen"]


def distributions(folder, change=lambda model: None):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    change(model)
    ids = torch.arange(3, 67).reshape(2, 32)
    with torch.no_grad():
        return model(ids).logits.log_softmax(-1)


@pytest.mark.parametrize("start,layers,rounding", [("dense", 6, 1e-4), ("hybrid-moe", 8, 1e-3)])
def test_a_larger_checkpoint_computes_the_same_function(start, layers, rounding, tmp_path):
    widen(START / start, tmp_path, hidden=2, mlp=4, layers=layers)
    expected, found = distributions(START / start), distributions(tmp_path)
    assert (found - expected).abs().max() < rounding

    def add(model):  # negative control: an added layer that adds something
        mixer = getattr(model.model.layers[5], "self_attn", None)
        (model.model.layers[5].linear_attn.out_proj if mixer is None else mixer.o_proj).weight.data.fill_(1.0)

    assert (distributions(tmp_path, add) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("sizes", [dict(hidden=3, mlp=2, layers=4), dict(hidden=2, mlp=0, layers=4), dict(hidden=2, mlp=2, layers=3)])
def test_sizes_that_would_change_it_are_refused(tmp_path, sizes):
    with pytest.raises(SystemExit, match="powers of two and at least 4 layers"):
        widen(START / "dense", tmp_path, **sizes)
    assert not any(tmp_path.iterdir())


def test_another_architecture_is_refused(tmp_path):
    config = json.loads((START / "dense" / "config.json").read_text()) | {"architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="Qwen3ForCausalLM or Qwen3_5MoeForCausalLM"):
        widen(tmp_path, tmp_path / "larger", hidden=2, mlp=2, layers=8)
