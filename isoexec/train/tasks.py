"""Prompts from reasoning-gym's generators, as SkyRL's prompt datasets.

A generator draws problem ``i`` under seed ``s`` from ``s + i``: two data sets whose seeds are closer than their sizes share problems.
Here train and held-out rows come from ranges that cannot meet, and a question that occurs in both is taken out of the train rows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from isoexec.contract import ContractError

#: Environment name in SkyRL-Gym's registry.
ENVIRONMENT = "reasoning_gym"
#: Where held-out problems start; train problems start at 0.
HELD_OUT_OFFSET = 1 << 30
#: Problems drawn for each row wanted before a generator is said to have too few distinct ones.
_DRAWS = 20
#: Seeds lie this far apart, so that two runs with neighbouring seeds do not train on the same problems.
_SEED_STRIDE = 1 << 20


@dataclass(frozen=True)
class Task:
    """A generator with its settings.

    Attributes:
        generator: name in reasoning-gym, e.g. ``chain_sum``.
        config: settings of the generator; ``seed`` and ``size`` are ours.
        partial_credit: reward the scorer's value as it is; otherwise 1 for full marks and 0 for anything less.
        instruction: put before each question, empty for none.
    """

    generator: str = "chain_sum"
    config: Mapping[str, object] = field(default_factory=dict)
    partial_credit: bool = False
    instruction: str = ""

    def __post_init__(self):
        if taken := {"seed", "size"} & set(self.config):
            raise ContractError(
                f"recipe.task.config: {', '.join(sorted(taken))} is set by the run, not by the task; "
                "use isoexec.seed, recipe.task.train and recipe.task.held_out"
            )


def make_dataset(generator: str, config: Mapping[str, object], *, seed: int, size: int):
    """The reasoning-gym data set of a generator.

    Raises:
        ContractError: unknown generator, or settings that it does not take.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if generator not in DATASETS:
        raise ContractError(f"recipe.task.generator: {generator!r} is not in reasoning-gym; it has {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(generator, **config, seed=seed, size=size)
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise ContractError(f"recipe.task.config: {generator} refuses {dict(config)!r}: {error}") from error


@functools.lru_cache(maxsize=64)
def scorer(generator: str, config_json: str):
    """``score(answer, entry) -> float`` of a generator with the settings in ``config_json``."""
    return make_dataset(generator, json.loads(config_json), seed=0, size=1).score_answer


def draw(task: Task, count: int, *, start: int, exclude: Iterable[str] = ()) -> list[dict]:
    """``count`` entries with distinct questions, from problem ``start`` on.

    Args:
        exclude: questions that may not be drawn.

    Raises:
        ContractError: the generator has too few distinct problems with these settings.
    """
    seen, entries = set(exclude), []
    dataset = make_dataset(task.generator, task.config, seed=start, size=count * _DRAWS)
    for index in range(count * _DRAWS):
        entry = dataset[index]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            entries.append(entry)
            if len(entries) == count:
                return entries
    raise ContractError(
        f"recipe.task: {task.generator} with {dict(task.config)!r} gave {len(entries)} distinct problems in {count * _DRAWS} draws, "
        f"{count} are wanted; make the task larger or the data set smaller"
    )


def split(task: Task, train: int, held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """(train entries, held-out entries) with no question in common. The held-out ones do not depend on ``seed``: runs stay comparable."""
    kept = draw(task, held_out, start=HELD_OUT_OFFSET)
    return draw(task, train, start=seed * _SEED_STRIDE, exclude=(e["question"] for e in kept)), kept


def row(task: Task, entry: Mapping) -> dict:
    """An entry as a row of a SkyRL prompt data set. What a scorer needs travels as JSON text, so that every row has the same columns."""
    question = f"{task.instruction}\n\n{entry['question']}" if task.instruction else entry["question"]
    return {
        "prompt": [{"role": "user", "content": question}],
        "env_class": ENVIRONMENT,
        "data_source": task.generator,
        "reward_spec": {"method": "rule", "ground_truth": str(entry["answer"])},
        "generator": task.generator,
        "generator_config": json.dumps(dict(task.config), sort_keys=True),
        "partial_credit": task.partial_credit,
        "entry": json.dumps(dict(entry), default=str, sort_keys=True),
    }


def write(path: Path, task: Task, entries: Iterable[Mapping]) -> Path:
    """Rows as JSON lines; the same task and entries give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for entry in entries:
            file.write(json.dumps(row(task, entry), sort_keys=True) + "\n")
    return path
