"""``isoexec train``: words, printing, and bad input as one line with exit status 2."""

import json
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from isoexec import cli
from isoexec.train.compose import recipe_names


def run(capsys, *words):
    status = cli.main(["train", *words])
    return status, *capsys.readouterr()


def test_printing_a_recipe_ends_without_a_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "--arm", "native", "--cfg", "job", "tiny-dense", "trainer.train_batch_size=16")
    config = OmegaConf.create(out)
    assert status == 0 and list(tmp_path.iterdir()) == []
    assert config.recipe.name == "tiny-dense" and config.isoexec.arm == "native" and config.trainer.train_batch_size == 16


@pytest.mark.parametrize(
    "words",
    [
        "tiny-dense --arm native isoexec.seed=3 --cfg job trainer.train_batch_size=16",
        "isoexec.seed=3 trainer.train_batch_size=16 tiny-dense --cfg job --arm native",
        "--cfg job isoexec.seed=3 --arm native trainer.train_batch_size=16 tiny-dense",
    ],
)
def test_words_and_options_come_in_any_order(capsys, words):
    status, out, _ = run(capsys, *words.split())
    config = OmegaConf.create(out)
    assert status == 0 and (config.recipe.name, config.isoexec.arm) == ("tiny-dense", "native")
    assert (config.isoexec.seed, config.trainer.train_batch_size) == (3, 16)


def test_the_help_names_every_recipe_and_status(capsys):
    with pytest.raises(SystemExit):
        run(capsys, "--help")
    said = capsys.readouterr().out
    assert all(f" {name} " in said for name in recipe_names())
    assert all(f" {status} " in said.partition("exit status:")[2] for status in range(5))


@pytest.mark.parametrize("words", ["tiny --arn native", "tiny --cfg job -x isoexec.seed=3"])
def test_an_option_that_there_is_not_is_refused(capsys, words):
    with pytest.raises(SystemExit) as ended:
        run(capsys, *words.split())
    assert ended.value.code == 2 and "unrecognized arguments: -" in capsys.readouterr().err


def test_the_recipe_may_be_left_out(capsys):
    status, out, _ = run(capsys, "--cfg", "job", "isoexec.seed=3")
    config = OmegaConf.create(out)
    assert status == 0 and config.recipe.name == "tiny" and config.isoexec.seed == config.trainer.seed == 3


@pytest.mark.parametrize(
    "words, message",
    [
        (["tinny"], "recipe 'tinny' is unknown"),
        (["tiny", "isoexec.seed=3", "tiny-dense"], "expected one recipe, found tiny, tiny-dense; an override is KEY=VALUE"),
        (["tiny", "trainer.nothing=1"], "no key 'trainer.nothing'; one that is in no file is added with +trainer.nothing=VALUE"),
        (["tiny", "trainer.max_trainig_steps=1"], "no key 'trainer.max_trainig_steps'; there is trainer.max_training_steps"),
        (["tiny", "max_training_steps=1"], "no key 'max_training_steps'; there is trainer.max_training_steps; one that"),
        (["--compare", "isoexec.arm=native"], "a comparison runs both arms"),
        (["tiny", "recipe.task.train=0"], "recipe.task.train"),
        (
            ["tiny", "recipe.task=null", "data.train_data=[rows.jsonl]", "data.val_data=[rows.jsonl]"],
            "row 0: no column 'generator' or 'generator_config' or 'entry'",
        ),
        (["tiny", "trainer.max_prompt_length=600"], "the model's context holds 512 tokens"),
        (["tiny", "trainer.max_prompt_length=12"], "prompts have more than trainer.max_prompt_length = 12 tokens"),
        (["tiny", "generator.sampling_params.temperature=0"], "generator.sampling_params.temperature: expected more than 0, found 0"),
        (["tiny", "trainer.algorithm.temperature=0.5"], "trainer.algorithm.temperature: expected that of generator.sampling_params, 1.0"),
        (["tiny", "trainer.fully_async.enabled=true"], "trainer.fully_async.enabled: expected False, found True"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "1 + 1 ="}]}\n')
    status, out, err = run(capsys, *words)
    lines = [line for line in err.splitlines() if line.startswith("isoexec: ")]
    assert status == 2 and out == "" and len(lines) == 1 and message in lines[0] and "Traceback" not in err


def test_a_folder_with_any_characters_survives_the_override_grammar(composed):
    from pathlib import Path

    from isoexec.train.launch import _quoted

    for name in ("out/a b", "out/it's", "out/a=b,c", r"out/back\slash", r"out/it\'s", "out/end\\", "out/x[1]"):
        assert composed("tiny", f"isoexec.out={_quoted(Path(name))}").isoexec.out == name


def test_a_second_run_into_the_same_folder_is_refused(capsys, tmp_path):
    from isoexec.verify.folder import alone

    with alone(tmp_path):
        status, _, text = run(capsys, "tiny", f"isoexec.out={tmp_path}")
    assert status == 2 and "another run writes to" in text and "with isoexec.out" in text


def test_a_folder_that_cannot_be_made_is_named(capsys, tmp_path):
    (tmp_path / "file").touch()
    status, _, text = run(capsys, "tiny", f"isoexec.out={tmp_path / 'file' / 'out'}")
    assert status == 2 and "isoexec.out" in text and "name a folder that can be written to" in text


@pytest.mark.parametrize("captured", [False, True])
def test_a_mismatch_is_traced_as_it_was_sampled(tmp_path, monkeypatch, captured):
    from isoexec.train import launch

    (tmp_path / "mismatch.json").write_text(json.dumps({"captured": captured}))
    called = []
    monkeypatch.setattr(launch.subprocess, "run", lambda words, **_: called.append(words) or SimpleNamespace(returncode=1))
    launch._trace(tmp_path)
    (words,) = called
    options = cli._options(words[words.index("trace") :])
    assert options.mismatch == tmp_path and options.html == tmp_path / "trace.html"
    assert (options.cuda_graphs, options.level) == ((True, "ops") if captured else (False, "state"))
