"""Prompt files: drawn from a task, or the user's; read and checked before a run starts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from isoexec.contract import ContractError
from isoexec.train import tasks
from isoexec.train.section import TaskSection

#: Environment -> what its rows need beside ``prompt``; a dot enters a nested column. Others are taken as they are.
NEEDS = {
    tasks.ENVIRONMENT: ("generator", "generator_config", "entry"),
    "aime": ("reward_model.ground_truth",),
    "gsm8k": ("reward_spec.ground_truth",),
}


@dataclass(frozen=True)
class Lengths:
    """Prompts of a file: how many, the tokens of the longest, and how many are too long."""

    prompts: int
    longest: int
    too_long: int


def write_task(section: TaskSection, seed: int, folder: Path) -> tuple[Path, Path]:
    """Draw a task's problems into ``train.jsonl`` and ``held_out.jsonl``; the same arguments give the same bytes.

    Args:
        section: the task.
        seed: of the run.
        folder: for this task and seed alone: what it holds was drawn for them before.
    """
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    if all(file.exists() for file in files):
        return files
    task = section.task()
    for file, entries in zip(files, tasks.split(task, section.train, section.held_out, seed), strict=True):
        tasks.write(file, task, entries)
    return files


def check_file(path: Path, env_class: str, tokenizer, limit: int, known: Collection[str] | None = None) -> Lengths:
    """Every row has what its environment needs, and its prompt fits.

    Args:
        path: ``.parquet``, ``.jsonl`` or ``.json``, the two latter with one row on each line.
        env_class: of rows that name none.
        tokenizer: with a chat template.
        limit: tokens that a prompt may have, the template's included.
        known: environments that a row may name; None: any.

    Raises:
        ContractError: the file cannot be read, holds no row, or a row lacks a column or has a prompt of another form.
    """
    lengths = []
    for number, row in enumerate(_rows(path)):
        where = f"{path}, row {number}"
        own = row.get("env_class") or env_class
        if not isinstance(own, str) or (known is not None and own not in known):
            expected = "a name" if known is None else f"one of {', '.join(sorted(known))}"
            raise ContractError(f"{where}: env_class: expected {expected}, found {own!r}; isoexec.environments names others")
        _check_columns(row, own, where)
        try:
            tokens = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:  # templates raise what they like
            raise ContractError(f"{where}: the chat template refuses its prompt: {error}") from error
        lengths.append(len(tokens))
    if not lengths:
        raise ContractError(f"{path}: expected rows, found none")
    return Lengths(len(lengths), max(lengths), sum(length > limit for length in lengths))


def _check_columns(row: Mapping, env_class: str, where: str) -> None:
    needed = ("prompt", *NEEDS.get(env_class, ()))
    if missing := [name for name in needed if not _has(row, name)]:
        raise ContractError(
            f"{where}: no column {' or '.join(map(repr, missing))}; environment {env_class!r} needs {', '.join(needed)}, "
            f"found {', '.join(sorted(row))}"
        )
    prompt = row["prompt"]
    good = isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in prompt)
    if not good:
        raise ContractError(f"{where}: prompt: expected a list of messages with role and content, found {str(prompt)[:80]!r}")


def _has(row, name: str) -> bool:
    for part in name.split("."):
        if not isinstance(row, Mapping) or row.get(part) is None:
            return False
        row = row[part]
    return True


def _rows(path: Path) -> Iterator[Mapping]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix in (".json", ".jsonl"):
        yield from _json_rows(path)
    else:
        raise ContractError(f"{path}: expected a .parquet, .jsonl or .json file; data sets are not fetched by name")


def _parquet_rows(path: Path) -> Iterator[Mapping]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ContractError(f"{path}: cannot be read: {error}") from error


def _json_rows(path: Path) -> Iterator[Mapping]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ContractError(f"{path}, line {number}: expected an object, found {line.strip()[:80]!r}")
                    yield row
    except (OSError, ValueError) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"{path}: cannot be read: {error}") from error
