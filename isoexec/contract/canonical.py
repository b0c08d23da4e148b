"""Canonical JSON: one byte string per value, so that digests can be compared across processes."""

import hashlib
import json

from isoexec.contract.errors import ContractError


def canonical_json(value) -> str:
    """Serialise ``value`` (dict, list, str, int, bool, None) with sorted keys and no spaces.

    Decimal floats are refused: their text depends on the printer. Write a float as its bit pattern.

    Raises:
        ContractError: a float, a non-string key or a type that JSON does not have.
    """
    _refuse_inexact(value, path="$")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256_hex(value) -> str:
    """SHA-256 over the canonical JSON of ``value``, as 64 hex digits."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def _refuse_inexact(value, path: str) -> None:
    if value is None or isinstance(value, (str, bool, int)):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ContractError(f"{path}: key {key!r} is not a string")
            _refuse_inexact(item, f"{path}.{key}")
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_inexact(item, f"{path}[{index}]")
        return
    hint = "; write it as the bit pattern of its fp32 value" if isinstance(value, float) else ""
    raise ContractError(f"{path}: {type(value).__name__} {value!r} has no canonical form{hint}")
