"""A start checkpoint made larger computes what it did."""

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


def test_a_larger_checkpoint_computes_the_same_function(tmp_path):
    widen(START / "dense", tmp_path, hidden=2, mlp=4, layers=6)
    expected, found = distributions(START / "dense"), distributions(tmp_path)
    assert (found - expected).abs().max() < 1e-4

    def add(model):  # negative control: an added layer that adds something
        model.model.layers[5].mlp.down_proj.weight.data.fill_(1e-2)

    assert (distributions(tmp_path, add) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("sizes", [dict(hidden=3, mlp=2, layers=4), dict(hidden=2, mlp=0, layers=4), dict(hidden=2, mlp=2, layers=3)])
def test_sizes_that_would_change_it_are_refused(tmp_path, sizes):
    with pytest.raises(SystemExit, match="powers of two and at least 4 layers"):
        widen(START / "dense", tmp_path, **sizes)
    assert not any(tmp_path.iterdir())


def test_another_architecture_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="Qwen3ForCausalLM"):
        widen(START / "hybrid-moe", tmp_path, hidden=2, mlp=2, layers=8)
