"""Reading ``steps.jsonl``: JSON lines, of which a killed run may leave the last one unfinished."""

from __future__ import annotations

import json
from pathlib import Path

from isoexec.contract import ContractError


def read_steps(path: Path) -> list[dict]:
    """Lines of a file; [] where there is none. A last line without its end is left out.

    Raises:
        ContractError: another line is no step, or the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"{path}: cannot be read: {error}") from error
    return [_step(path, number, text) for number, text in enumerate(lines, 1)]


def _step(path: Path, number: int, text: str) -> dict:
    try:
        step = json.loads(text)
    except ValueError as error:
        raise ContractError(f"{path}, line {number}: {error}") from error
    if not isinstance(step, dict) or not isinstance(step.get("step"), int):
        raise ContractError(f"{path}, line {number}: expected a step, found {text[:80]!r}")
    return step
