"""``isoexec train``: words, printing, and bad input as one line with exit status 2."""

import pytest
from omegaconf import OmegaConf

from isoexec import cli


def run(capsys, *words):
    status = cli.main(["train", *words])
    return status, *capsys.readouterr()


def test_printing_a_recipe_ends_without_a_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "--arm", "native", "--cfg", "job", "tiny-dense", "trainer.train_batch_size=16")
    config = OmegaConf.create(out)
    assert status == 0 and list(tmp_path.iterdir()) == []
    assert config.recipe.name == "tiny-dense" and config.isoexec.arm == "native" and config.trainer.train_batch_size == 16


def test_the_recipe_may_be_left_out(capsys):
    status, out, _ = run(capsys, "--cfg", "job", "isoexec.seed=3")
    config = OmegaConf.create(out)
    assert status == 0 and config.recipe.name == "tiny" and config.isoexec.seed == config.trainer.seed == 3


@pytest.mark.parametrize(
    "words, message",
    [
        (["tinny"], "recipe 'tinny' is unknown"),
        (["tiny", "trainer.nothing=1"], "trainer.nothing"),
        (["--compare", "isoexec.arm=native"], "a comparison runs both arms"),
        (["tiny", "recipe.task.train=0"], "recipe.task.train"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *words)
    lines = [line for line in err.splitlines() if line.startswith("isoexec: ")]
    assert status == 2 and out == "" and len(lines) == 1 and message in lines[0] and "Traceback" not in err


def test_a_folder_with_any_characters_survives_the_override_grammar(composed):
    from pathlib import Path

    from isoexec.train.launch import _quoted

    for name in ("out/a b", "out/it's", "out/a=b,c", r"out/back\slash", r"out/it\'s", "out/end\\", "out/x[1]"):
        assert composed("tiny", f"isoexec.out={_quoted(Path(name))}").isoexec.out == name


def test_a_second_run_into_the_same_folder_is_refused(tmp_path):
    from isoexec.contract import ContractError
    from isoexec.train.launch import _alone

    with _alone(tmp_path), pytest.raises(ContractError, match="another run writes to"), _alone(tmp_path):
        pass
