"""Prompt files of the user, read and checked before a run."""

import json

import pyarrow
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from isoexec.contract import ContractError
from isoexec.train.compose import RECIPES
from isoexec.train.data import check_file

PROMPT = [{"role": "user", "content": "1 + 1 ="}]
GOOD = {"prompt": PROMPT, "env_class": "aime", "reward_model": {"ground_truth": "2"}}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(RECIPES / "start" / "dense")


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_lengths_include_the_template(tmp_path, tokenizer):
    bare = len(tokenizer.encode(PROMPT[0]["content"]))
    found = check_file(lines(tmp_path / "a.jsonl", GOOD, GOOD | {"prompt": PROMPT * 2}), "aime", tokenizer, bare + 8)
    assert found.prompts == 2 and found.longest > 2 * bare and found.too_long == 1


def test_parquet_and_json_lines_are_the_same(tmp_path, tokenizer):
    parquet.write_table(pyarrow.Table.from_pylist([GOOD, GOOD]), tmp_path / "a.parquet")
    found = [check_file(path, "aime", tokenizer, 50) for path in (tmp_path / "a.parquet", lines(tmp_path / "a.jsonl", GOOD, GOOD))]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "rows, message",
    [
        ([GOOD, {k: v for k, v in GOOD.items() if k != "prompt"}], "row 1: no column 'prompt'"),
        ([GOOD | {"reward_model": {}}], "row 0: no column 'reward_model.ground_truth'; environment 'aime' needs"),
        ([GOOD | {"reward_model": None}], "no column 'reward_model.ground_truth'"),
        ([{"prompt": PROMPT, "env_class": "reasoning_gym"}], "no column 'generator' or 'generator_config' or 'entry'"),
        ([GOOD | {"prompt": "1 + 1"}], "expected a list of messages with role and content, found '1 . 1'"),
        ([GOOD | {"prompt": []}], "expected a list of messages"),
        ([GOOD | {"prompt": [{"role": "user"}]}], "expected a list of messages"),
        ([], "expected rows, found none"),
        ([GOOD | {"env_class": ["x"]}], "row 0: env_class: expected one of aime, reasoning_gym, found .'x'."),
        ([GOOD, GOOD | {"env_class": "x"}], "row 1: env_class: expected one of aime, reasoning_gym, found 'x'"),
    ],
)
def test_a_bad_row_is_named(tmp_path, tokenizer, rows, message):
    with pytest.raises(ContractError, match=message):
        check_file(lines(tmp_path / "a.jsonl", *rows), "aime", tokenizer, 50, {"aime", "reasoning_gym"})


def test_a_row_without_an_environment_takes_the_run_s(tmp_path, tokenizer):
    path = lines(tmp_path / "a.jsonl", {"prompt": PROMPT})
    assert check_file(path, "my_environment", tokenizer, 50).prompts == 1
    with pytest.raises(ContractError, match="environment 'gsm8k' needs prompt, reward_spec.ground_truth, found prompt"):
        check_file(path, "gsm8k", tokenizer, 50)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", "x", "expected a .parquet, .jsonl or .json file"),
        ("a.jsonl", "{", "cannot be read"),
        ("a.jsonl", "[1]\n", "expected an object"),
        ("a.parquet", "x", "cannot be read"),
    ],
)
def test_a_file_that_is_none_of_these_is_refused(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ContractError, match=message):
        check_file(tmp_path / name, "aime", tokenizer, 50)
