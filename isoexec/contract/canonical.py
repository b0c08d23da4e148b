"""Canonical JSON: one byte string per value, so that digests can be compared across processes. And its strict reader."""

import hashlib
import json
import reprlib
import struct

from isoexec.contract.errors import ContractError

#: Bounds of a document: what is larger or deeper is not a contract, and is refused before anything recurses into it.
LARGEST_TEXT = 4 << 20
DEEPEST = 24

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


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


def parse_json(text: str, what: str = "the contract"):
    """Value of a JSON text without floats and without repeated keys.

    Raises:
        ContractError: ``text`` is not JSON, has a decimal float or an object with a key twice, or is larger or deeper than a contract is.
    """
    if len(text) > LARGEST_TEXT:
        raise ContractError(f"{what} is not JSON that can be one: {len(text)} characters, more than {LARGEST_TEXT}")
    try:
        value = json.loads(text, parse_float=_no_float, parse_constant=_no_float, object_pairs_hook=_no_repeated_key)
    except ContractError as error:
        raise ContractError(f"{what}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{what} is not JSON: {error}") from None
    _refuse_depth(value, what)
    return value


def bits32(value: float) -> str:
    """Bit pattern of the fp32 value nearest to ``value``, e.g. ``"0x3f800000"`` for 1."""
    return f"0x{struct.unpack('>I', struct.pack('>f', value))[0]:08x}"


def bits64(value: float) -> str:
    """Bit pattern of an fp64 value, 16 hex digits."""
    return f"0x{struct.unpack('>Q', struct.pack('>d', value))[0]:016x}"


def shown(value) -> str:
    """``repr`` of a value of any size, cut so that an error stays one readable line."""
    return _short.repr(value)


def printable(text: str) -> str:
    """``text`` of a file from elsewhere for a terminal: line breaks, control characters and lone surrogates as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _no_float(text: str):
    raise ContractError(f"number {text[:40]}: a decimal float has no canonical form; write it as the bit pattern of its fp32 value")


def _no_repeated_key(pairs) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ContractError(f"key {shown(next(k for k in keys if keys.count(k) > 1))} appears twice in one object; keep one")
    return found


def _refuse_depth(value, what: str) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [child for item in level if isinstance(item, (dict, list)) for child in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    raise ContractError(f"{what}: nested more than {DEEPEST} deep")


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
