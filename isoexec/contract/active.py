"""The one switch: ``ISOEXEC_CONTRACT=<file>``."""

from __future__ import annotations

import functools
import os

from isoexec.contract.canonical import LARGEST_TEXT
from isoexec.contract.errors import ContractError
from isoexec.contract.types import ExecutionContract

CONTRACT_VARIABLE = "ISOEXEC_CONTRACT"


def active_contract() -> ExecutionContract | None:
    """The contract of this process, or None when ``ISOEXEC_CONTRACT`` is unset or empty.

    The file is read once per process and path: a contract does not change under a running engine.

    Raises:
        ContractError: the file cannot be read or is not a valid contract.
    """
    path = os.environ.get(CONTRACT_VARIABLE)
    return _load(path) if path else None


@functools.lru_cache(maxsize=None)
def _load(path: str) -> ExecutionContract:
    try:
        if not (os.path.isfile(path) or os.path.isdir(path)) and os.path.exists(path):  # to open a pipe may wait for ever
            raise ContractError(
                f"{CONTRACT_VARIABLE}={path}: expected a file that each process can read, found a pipe or device; write it to a file"
            )
        with open(path, encoding="utf-8") as file:
            text = file.read(LARGEST_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"{CONTRACT_VARIABLE}={path}: cannot read the contract: {error}") from None
    try:
        return ExecutionContract.from_json(text)
    except ContractError as error:
        raise ContractError(f"{CONTRACT_VARIABLE}={path}: {error}") from None
