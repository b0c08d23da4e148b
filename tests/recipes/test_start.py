"""The start checkpoints: their tokenizer, their size, and that they are neither ignorant nor finished."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isoexec.runtimes.megatron.settings import ARCHITECTURES
from isoexec.train import tasks
from isoexec.train.compose import RECIPES

START = RECIPES / "start"
NAMES = ("dense", "hybrid-moe")


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request):
    return START / request.param


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


def test_all_of_them_together_are_small():
    files = [path for name in NAMES for path in (START / name).iterdir()]
    assert sum(path.stat().st_size for path in files) < 8_000_000
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".py")]


def test_both_runtimes_know_the_architecture(checkpoint):
    assert set(json.loads((checkpoint / "config.json").read_text())["architectures"]) <= set(ARCHITECTURES)


def test_every_text_comes_back(tokenizer):
    for text in (
        "State the final answer to the following arithmetic problem: 4 - 1 =",
        "naïve Ünïcode ∑ 🙂\t\n  x",
        "".join(map(chr, range(32, 127))),
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) <= 4096


def test_each_digit_is_a_token(tokenizer):
    for number in ("7", "42", "1234567890"):
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(number)) == list(number)


def test_prompts_of_the_task_fit_its_recipe(tokenizer, composed):
    config = composed("tiny")
    task = tasks.Task(config.recipe.task.generator, dict(config.recipe.task.config))
    for entry in tasks.draw(task, 20, start=0):
        prompt = tokenizer.apply_chat_template(tasks.row(task, entry)["prompt"], add_generation_prompt=True, return_dict=False)
        assert len(prompt) <= config.trainer.max_prompt_length
        assert len(tokenizer.encode(entry["answer"])) + 1 <= config.generator.sampling_params.max_generate_length


def test_it_passes_some_of_what_is_held_out(checkpoint, tokenizer, composed):
    """Room to rise by 15 points, and enough passes for groups to differ."""
    section = composed("tiny").recipe.task
    entries = tasks.draw(tasks.Task(section.generator, dict(section.config)), section.held_out, start=tasks.HELD_OUT_OFFSET)
    prompts = torch.tensor(
        [
            tokenizer.apply_chat_template([{"role": "user", "content": entry["question"]}], add_generation_prompt=True, return_dict=False)
            for entry in entries
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    said = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=6
    )
    texts = tokenizer.batch_decode(said[:, prompts.shape[1] :], skip_special_tokens=True)
    passed = sum(text.strip() == entry["answer"] for text, entry in zip(texts, entries, strict=True)) / len(entries)
    assert 0.1 < passed < 0.5
