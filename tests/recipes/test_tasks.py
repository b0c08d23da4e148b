"""Drawing problems, and scoring answers with the generators' own scorers."""

import json
import math

import pytest

from isoexec.contract import ContractError
from isoexec.train import tasks
from isoexec.train.data import write_task
from isoexec.train.environment import ReasoningGymEnv, answer_of
from isoexec.train.section import TaskSection

SUMS = tasks.Task("chain_sum", dict(min_terms=3, max_terms=3, min_digits=1, max_digits=1))
SECTION = TaskSection("chain_sum", train=300, held_out=50, config=dict(SUMS.config))


def questions(entries):
    return [entry["question"] for entry in entries]


def test_train_and_held_out_share_no_problem():
    for seed in range(3):
        train, held_out = tasks.split(SUMS, 3000, 256, seed)
        both = questions(train) + questions(held_out)
        assert len(both) == len(set(both)) == 3256


def test_ranges_alone_would_share_problems():
    """Negative control: a space this small is drawn from twice, so what keeps the two apart is the exclusion."""
    held_out = tasks.draw(SUMS, 256, start=1 << 30)
    assert set(questions(tasks.draw(SUMS, 3000, start=0))) & set(questions(held_out))


def test_seed_decides_the_train_rows_and_not_the_held_out_ones():
    first, held_out = tasks.split(SUMS, 100, 50, seed=0)
    again, _ = tasks.split(SUMS, 100, 50, seed=0)
    other, same = tasks.split(SUMS, 100, 50, seed=1)
    assert first == again and questions(first) != questions(other)
    assert held_out == same


def test_files_are_the_same_bytes_again(tmp_path):
    files = [path.read_bytes() for folder in ("a", "b") for path in write_task(SECTION, 7, tmp_path / folder)]
    assert files[:2] == files[2:]
    assert files[0] != write_task(SECTION, 8, tmp_path / "c")[0].read_bytes()


def test_too_small_a_task_is_refused():
    with pytest.raises(ContractError, match="gave 200 distinct problems"):
        tasks.draw(tasks.Task("chain_sum", dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)), 300, start=0)


@pytest.mark.parametrize(
    "task, message",
    [
        (tasks.Task("chain_some"), "'chain_some' is not in reasoning-gym; it has .*chain_sum"),
        (tasks.Task("chain_sum", dict(min_turms=1)), "chain_sum refuses .*min_turms"),
        (tasks.Task("chain_sum", dict(min_terms=0)), "chain_sum refuses .*min_terms must be positive"),
    ],
)
def test_a_bad_task_is_one_message(task, message):
    with pytest.raises(ContractError, match=message) as error:
        tasks.draw(task, 1, start=0)
    assert "\n" not in str(error.value)


def test_a_task_does_not_set_the_seed():
    with pytest.raises(ContractError, match="seed is set by the run"):
        tasks.Task("chain_sum", dict(seed=3))


def environment(generator="chain_sum", config=None, **extras):
    task = tasks.Task(generator, config or {})
    [entry] = tasks.draw(task, 1, start=0)
    return entry, ReasoningGymEnv(extras=tasks.row(task, entry) | extras)


@pytest.mark.parametrize("generator", ["chain_sum", "gcd", "spell_backward", "number_sorting", "countdown", "simple_equations"])
def test_any_generator_scores_by_its_own_rule(generator):
    entry, env = environment(generator)
    right = env.step(entry["answer"] if generator != "countdown" else entry["metadata"]["expression"])
    assert right["reward"] == 1.0 and right["done"]
    assert env.step("no answer")["reward"] == 0.0


def test_the_whole_response_or_the_tagged_part_is_scored():
    assert answer_of(" 12\n") == "12"
    assert answer_of("so <answer>3</answer> or <answer> 12 </answer>.") == "12"
    assert answer_of("<answer>12") == "<answer>12"
    entry, env = environment()
    assert env.step(f"it is <answer>{entry['answer']}</answer>")["reward"] == 1.0


def test_partial_credit_is_a_choice():
    entry, strict = environment()
    almost = entry["answer"] + "0"
    assert strict.step(almost)["reward"] == 0.0 and 0 < strict.step(almost)["metadata"]["score"] < 1
    _, lenient = environment(partial_credit=True)
    assert 0 < lenient.step(almost)["reward"] < 1


@pytest.mark.parametrize(
    "bad, message", [(math.nan, "gave nan"), (math.inf, "gave inf"), ("a", "raised ValueError"), (None, "raised TypeError")]
)
def test_a_reward_that_is_no_number_stops(bad, message):
    _, env = environment()
    env.score = lambda answer, entry: bad
    with pytest.raises(ContractError, match=f"reward: the scorer of chain_sum {message}"):
        env.step("1")


def test_a_scorer_that_raises_stops():
    _, env = environment()

    def scorer(answer, entry):
        raise RuntimeError("out of paper")

    env.score = scorer
    with pytest.raises(ContractError, match="raised RuntimeError: out of paper, on the answer '1'"):
        env.step("1")


def test_a_row_without_its_columns_is_refused():
    with pytest.raises(ContractError, match="the row lacks generator_config, entry"):
        ReasoningGymEnv(extras={"generator": "chain_sum"})


def test_rows_have_one_schema_whatever_the_entry_holds():
    rows = [tasks.row(tasks.Task(name), tasks.draw(tasks.Task(name), 1, start=0)[0]) for name in ("chain_sum", "gcd", "mini_sudoku")]
    assert len({tuple(sorted((key, type(value).__name__) for key, value in row.items())) for row in rows}) == 1
    assert all(isinstance(json.loads(row["entry"]), dict) for row in rows)
