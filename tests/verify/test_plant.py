"""The planted fault: whole checkpoints only, and nothing of the original is touched."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from isoexec.contract import ContractError
from isoexec.verify.plant import PLANTED_WEIGHT, plant_ulp

NORM = f"model.{PLANTED_WEIGHT}"


@pytest.fixture
def model(tmp_path):
    """Two shards and a config."""
    folder = tmp_path / "a model"
    folder.mkdir()
    save_file({"model.embed_tokens.weight": torch.ones(4, 2, dtype=torch.bfloat16)}, folder / "1.safetensors", {"format": "pt"})
    save_file({NORM: torch.ones(2, dtype=torch.bfloat16)}, folder / "2.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_one_file_is_copied_and_the_rest_is_linked(model, tmp_path):
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    (model / "2.safetensors").chmod(0o444)
    planted = tmp_path / "planted"
    assert plant_ulp(model, planted) == NORM
    assert load_file(planted / "2.safetensors")[NORM].view(torch.int16).tolist() == [0x3F81, 0x3F80]
    assert {path.name for path in planted.iterdir() if path.is_symlink()} == {"1.safetensors", "config.json"}
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_a_relative_folder_is_linked_too(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plant_ulp(model.relative_to(tmp_path), tmp_path / "planted")
    assert (tmp_path / "planted" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("shard", ["1.safetensors", "2.safetensors"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: raw[:-1], "is not whole: expected"),
        (lambda raw: raw + b"\0", "is not whole: expected"),
        (lambda raw: raw[:20], "is no safetensors file"),
        (lambda raw: b"", "is no safetensors file"),
        (lambda raw: b"\xff" * 64, "is no safetensors file"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1", "is no safetensors file"),
        (lambda raw: (2).to_bytes(8, "little") + b"[]", "is no safetensors file"),
    ],
)
def test_a_spoilt_file_is_refused(model, tmp_path, shard, spoil, message):
    path = model / shard
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ContractError, match=f"{shard} {message}"):
        plant_ulp(model, tmp_path / "planted")
    assert not (tmp_path / "planted").exists()


def test_other_dtypes_are_refused(model, tmp_path):
    save_file({NORM: torch.ones(2)}, model / "2.safetensors")
    with pytest.raises(ContractError, match="no weight .* in BF16 .*, but one in F32"):
        plant_ulp(model, tmp_path / "planted")


def test_weights_that_no_side_loads_are_left_alone(model, tmp_path):
    """A draft head's layer 0, in a shard that comes first, and a file of another format beside a whole one."""
    save_file({f"mtp.{PLANTED_WEIGHT}": torch.ones(2, dtype=torch.bfloat16)}, model / "0.safetensors")
    assert plant_ulp(model, tmp_path / "planted") == NORM
    save_file({NORM: torch.ones(2, dtype=torch.bfloat16)}, model / "model.safetensors")
    assert plant_ulp(model, tmp_path / "single") == NORM
    assert [path.name for path in (tmp_path / "single").glob("*.safetensors") if not path.is_symlink()] == ["model.safetensors"]
