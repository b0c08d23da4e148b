"""What the tests of recipes share: a composed configuration, and a checkpoint folder without weights worth loading."""

import json

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from isoexec.train.compose import RECIPES, compose

#: What recipes leave to the user.
GIVEN = {
    "gpu": ["recipe.task.generator=gcd"],
    "node": ["data.train_data=[train.parquet]", "data.val_data=[val.parquet]"],
    "nodes": ["data.train_data=[train.parquet]", "data.val_data=[val.parquet]"],
}


@pytest.fixture(scope="session")
def composed():
    """``composed(recipe, *overrides)``: a copy of the composed configuration; each combination is composed once."""
    made = {}

    def get(recipe, *overrides):
        if (recipe, overrides) not in made:
            made[recipe, overrides] = compose(recipe, [*GIVEN.get(recipe, ()), *overrides])
        return OmegaConf.create(OmegaConf.to_container(made[recipe, overrides]))

    return get


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A dense checkpoint folder with a context of 64 tokens, the start checkpoints' tokenizer and one tensor."""
    path = tmp_path_factory.mktemp("model")
    start = RECIPES / "start" / "dense"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((start / name).read_bytes())
    config = json.loads((start / "config.json").read_text()) | {"max_position_embeddings": 64}
    (path / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.zeros(1)}, path / "model.safetensors")
    return path
