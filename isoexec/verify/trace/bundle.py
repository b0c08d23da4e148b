"""Trace bundles: a zip of JSON and raw little-endian arrays that says what each side computed. Standard library only.

``bundle.json`` holds the sequences; ``<side>/side.json`` what one runtime recorded, its contract and what the process was;
``<side>/data.bin`` the arrays, which ``side.json`` names by offset.
"""

from __future__ import annotations

import json
import sys
import zipfile
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from isoexec.contract import ContractError
from isoexec.contract.canonical import shown

FORMAT, VERSION = "isoexec-trace", 1
#: Pseudo layers, as isoexec.ops._core.registry numbers them.
EMBEDDING, HEAD = -1, 1 << 20
_LARGEST_JSON, _LARGEST_DATA = 1 << 28, 1 << 34
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}


@dataclass
class Stream:
    """Digests of one stage in one case, a row for every token that it computed.

    Attributes:
        order: place of the stage in its layer.
        ops: names of the ops that ran.
        sequence, position: of each row.
        fields: name -> (kind, dtype, width of a row in bytes, digests or, of kind ``position``, the positions themselves).
    """

    order: int
    ops: tuple[str, ...]
    sequence: array
    position: array
    fields: dict[str, tuple[str, str, int, array]]


@dataclass
class Side:
    """What one runtime recorded.

    Attributes:
        name: ``engine``, ``trainer`` or another.
        level: that was recorded.
        contract: of the process, as JSON, or None.
        environment: what the process was.
        streams: (case, layer, stage, occurrence) -> records.
        lists: (case, layer) -> the sequences of (stage, occurrence) that its passes ran.
        weights: (layer, stage, occurrence) -> name -> shape, dtype, digest.
        constants: (layer, stage, occurrence) -> name -> value.
        states: (layer, what, sequence, position, digest) of states read and written.
        tensors: rows kept whole, with their bytes under ``data``.
        unplaced: names of fields -> times they were left out.
    """

    name: str
    level: str
    contract: dict | None
    environment: dict
    streams: dict[tuple, Stream]
    lists: dict[tuple, list[list[tuple[str, int]]]]
    weights: dict[tuple, dict[str, dict]]
    constants: dict[tuple, dict[str, str]]
    states: list[tuple]
    tensors: list[dict]
    unplaced: dict[str, int]

    @property
    def cases(self) -> list[str]:
        """Cases that were recorded."""
        return sorted({case for case, *_ in self.streams})


@dataclass
class Sequence:
    """Token ids, how many of them are the prompt, and each side's logprobs of the others as fp32 bit patterns."""

    tokens: list[int]
    prompt: int
    logprobs: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Bundle:
    """Sequences by number, the sides, and what was asked for (temperature, setting, model)."""

    sequences: dict[int, Sequence]
    sides: list[Side]
    about: dict


def write(path: Path, sequences: dict[int, Sequence], sides: Iterable[tuple[str, dict, dict | None, dict]], about: dict) -> None:
    """Write a bundle.

    Args:
        path: of the file; replaced when it is whole.
        sequences: by number.
        sides: (name, what ``Recorder.finish`` returned, contract, environment).
        about: JSON values.
    """
    temporary = path.with_name(path.name + ".part")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        names = []
        for name, recording, contract, environment in sides:
            names.append(name)
            data = _Data()
            side = _packed(recording, data) | {"name": name, "contract": contract, "environment": environment}
            file.writestr(f"{name}/side.json", json.dumps(side))
            file.writestr(f"{name}/data.bin", b"".join(data.parts))
        _write_head(file, names, sequences, about)
    temporary.replace(path)


def join(path: Path, sequences: dict[int, Sequence], sides: Iterable[tuple[Path, Path | None]], about: dict) -> None:
    """Write one bundle of sides that were recorded each into its own.

    Args:
        path, sequences, about: as :func:`write`.
        sides: (bundle with one side, bundle of a second pass that kept rows whole, or None).
    """
    temporary = path.with_name(path.name + ".part")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        names = []
        for first, second in sides:
            name, side, raw = _raw_side(first)
            data = _Data([raw])
            if second is not None:
                _, other, other_raw = _raw_side(second)
                side["tensors"] += [t | {"data": data.add(other_raw[t["data"][0] : sum(t["data"])])} for t in other["tensors"]]
            names.append(name)
            file.writestr(f"{name}/side.json", json.dumps(side))
            file.writestr(f"{name}/data.bin", b"".join(data.parts))
        _write_head(file, names, sequences, about)
    temporary.replace(path)


def _raw_side(path: Path) -> tuple[str, dict, bytes]:
    with zipfile.ZipFile(path) as file:
        [name] = json.loads(file.read("bundle.json"))["sides"]
        return name, json.loads(file.read(f"{name}/side.json")), file.read(f"{name}/data.bin")


def _write_head(file: zipfile.ZipFile, names: list[str], sequences: dict[int, Sequence], about: dict) -> None:
    described = [{"number": n, **vars(s)} for n, s in sorted(sequences.items())]
    head = {"format": FORMAT, "version": VERSION, "sides": names, "sequences": described, "about": about}
    file.writestr("bundle.json", json.dumps(head))


class _Data:
    """Arrays laid one after the other."""

    def __init__(self, parts: Iterable[bytes] = ()):
        self.parts = list(parts)
        self._size = sum(map(len, self.parts))

    def add(self, raw: bytes) -> list[int]:
        """[offset, length] of ``raw``."""
        self.parts.append(raw)
        self._size += len(raw)
        return [self._size - len(raw), len(raw)]


def _packed(value, data: _Data):
    """``value`` with every ``bytes`` in it replaced by its place in ``data``."""
    if isinstance(value, bytes):
        return data.add(value)
    if isinstance(value, dict):
        return {key: _packed(item, data) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_packed(item, data) for item in value]
    return value


def read(path: Path) -> Bundle:
    """Read a bundle and check it.

    Raises:
        ContractError: it is no bundle, of another version, or not whole.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ContractError(f"{path}: expected a file, found {'a folder' if path.is_dir() else 'a pipe or a device'}; name a bundle")
    try:
        with zipfile.ZipFile(path) as file:
            described = _json(file, "bundle.json", path)
            if described.get("format") != FORMAT:
                raise ContractError(f"{path}: expected a trace bundle, found format {shown(described.get('format'))}")
            if described.get("version") != VERSION:
                raise ContractError(
                    f"{path}: bundle version {shown(described.get('version'))}, this isoexec reads {VERSION}; record it again, or "
                    "read it with the release that wrote it"
                )
            sequences = {entry["number"]: _sequence(entry) for entry in described["sequences"]}
            sides = [_side(file, name, path) for name in described["sides"]]
            about = _object(described["about"])
    except ContractError:
        raise
    except MemoryError:
        raise ContractError(f"{path}: holds more than the memory of this process; compare it where there is more") from None
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ContractError(f"{path}: not a zip file that is whole: {error}; record it again, or copy it in binary form") from None
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ContractError(f"{path}: not a bundle that is whole: {type(error).__name__}: {shown(str(error))}") from None
    return Bundle(sequences, sides, about)


def _json(file: zipfile.ZipFile, name: str, path: Path) -> dict:
    if file.getinfo(name).file_size > _LARGEST_JSON:
        raise ContractError(f"{path}: {name} holds {file.getinfo(name).file_size} bytes, more than a bundle can")
    value = json.loads(file.read(name))
    if not isinstance(value, dict):
        raise ContractError(f"{path}: {name}: expected an object, found {shown(value)}")
    return value


def _sequence(entry: dict) -> Sequence:
    tokens, prompt = _integers(entry["tokens"]), entry["prompt"]
    if type(prompt) is not int or not 0 <= prompt <= len(tokens) or type(entry["number"]) is not int:
        raise ValueError(f"sequence {entry['number']!r} with a prompt of {prompt!r} of {len(tokens)} tokens")
    logprobs = {str(side): _integers(bits) for side, bits in entry["logprobs"].items()}
    if any(not 0 <= b < 1 << 32 for bits in logprobs.values() for b in bits):
        raise ValueError("a logprob is no 32-bit pattern")
    return Sequence(tokens, prompt, logprobs)


def _object(value) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {shown(value)}")
    return value


def _integers(values) -> list[int]:
    if not isinstance(values, list) or any(type(v) is not int for v in values):
        raise ValueError(f"expected integers, found {shown(values)}")
    return values


def _side(file: zipfile.ZipFile, name: str, path: Path) -> Side:
    side = _json(file, f"{name}/side.json", path)
    if file.getinfo(f"{name}/data.bin").file_size > _LARGEST_DATA:
        raise ContractError(f"{path}: {name}/data.bin is larger than a bundle can be")
    data = memoryview(file.read(f"{name}/data.bin"))

    def raw(place, code: str | None = None):
        offset, length = place
        if not 0 <= offset <= offset + length <= len(data):
            raise ValueError(f"an array at {offset} of {length} bytes lies outside {name}/data.bin")
        part = data[offset : offset + length]
        if code is None:
            return bytes(part)
        values = array(code)
        values.frombytes(part)
        if sys.byteorder == "big":
            values.byteswap()
        return values

    return Side(
        name=str(side["name"]),
        level=str(side["level"]),
        contract=None if side["contract"] is None else _object(side["contract"]),
        environment=_object(side["environment"]),
        streams={(str(s["case"]), int(s["layer"]), str(s["stage"]), int(s["occurrence"])): _stream(s, raw) for s in side["streams"]},
        lists=_lists(side["lists"]),
        weights=_by_stage(side["weights"]),
        constants={_stage_of(c): {name: str(value) for name, value in _object(c["values"]).items()} for c in side["constants"]},
        states=[(int(s["layer"]), str(s["what"]), int(s["sequence"]), int(s["position"]), str(s["digest"])) for s in side["states"]],
        tensors=[_tensor(t, raw) for t in side["tensors"]],
        unplaced={name: int(count) for name, count in _object(side["unplaced"]).items()},
    )


def _stream(entry: dict, raw) -> Stream:
    sequence, position = raw(entry["sequence"], "i"), raw(entry["position"], "i")
    fields = {str(f["name"]): (str(f["kind"]), str(f["dtype"]), int(f["width"]), raw(f["data"], "Q")) for f in entry["fields"]}
    if any(len(column) != len(sequence) for column in (position, *(f[3] for f in fields.values()))):
        raise ValueError(f"the columns of {entry['stage']} differ in length")
    return Stream(int(entry["order"]), tuple(map(str, entry["ops"])), sequence, position, fields)


def _lists(entries) -> dict[tuple, list]:
    found: dict[tuple, list] = {}
    for entry in entries:
        stages = [(str(stage), int(occurrence)) for stage, occurrence in entry["stages"]]
        found.setdefault((str(entry["case"]), int(entry["layer"])), []).append(stages)
    return found


def _stage_of(entry: dict) -> tuple[int, str, int]:
    return int(entry["layer"]), str(entry["stage"]), int(entry["occurrence"])


def _by_stage(entries) -> dict[tuple, dict[str, dict]]:
    found: dict[tuple, dict] = {}
    for entry in entries:
        weight = {"shape": _integers(entry["shape"]), "dtype": str(entry["dtype"]), "digest": str(entry["digest"])}
        found.setdefault(_stage_of(entry), {})[str(entry["name"])] = weight
    return found


def _tensor(entry: dict, raw) -> dict:
    data = raw(entry["data"])
    elements = 1
    for length in _integers(entry["shape"]):
        elements *= length
    if _BYTES[entry["dtype"]] * elements != len(data):
        raise ValueError(f"a tensor {entry['dtype']}{entry['shape']} of {len(data)} bytes")
    named = dict(zip(("layer", "stage", "occurrence"), _stage_of(entry)))
    token = {name: int(entry[name]) for name in ("sequence", "position")}
    return named | token | {name: str(entry[name]) for name in ("case", "field", "dtype")} | {"shape": entry["shape"], "data": data}
