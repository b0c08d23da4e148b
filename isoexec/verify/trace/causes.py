"""Why a token differs first where it does: the class of a fault, and the first element. Standard library only."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from isoexec.verify.trace.bundle import Side
from isoexec.verify.trace.compare import Divergence, Misfit, layer_name, weights_differ

#: Class of a fault -> how it is called.
CLASSES = {
    "op": "op fault: same inputs, different outputs",
    "weights": "different weights",
    "state": "different position, mask or state",
    "sampling": "different sampling, temperature or tokens",
    "structure": "missing or extra op",
    "unknown": "not determined at this level",
}
_INTEGER = {"bfloat16": "<H", "float16": "<H", "float32": "<I", "float64": "<Q", "int64": "<Q", "int32": "<I", "int16": "<H", "int8": "<B",
            "uint8": "<B", "bool": "<B"}  # fmt: skip
_VALUE = {
    "float16": "<e",
    "float32": "<f",
    "float64": "<d",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
    "bool": "<?",
}


@dataclass(frozen=True)
class Element:
    """The first element of a row that differs.

    Attributes:
        field: argument or result.
        index: in the row.
        values: of both sides, as text.
        bits: of both sides.
        ulps: units in the last place between them, or None of integers and NaN.
        differing, of: elements of the row that differ, and all.
        largest: largest absolute difference in the row, or None.
    """

    field: str
    index: tuple[int, ...]
    values: tuple[str, str]
    bits: tuple[str, str]
    ulps: int | None
    differing: int
    of: int
    largest: float | None


@dataclass
class Finding:
    """What a person is told.

    Attributes:
        kind: key of :data:`CLASSES`.
        inputs_differ: whether the op's inputs already differed (the cause is before it); None where the level does not say.
        why: sentences, the most important first.
        element: first differing element, where rows were kept.
    """

    kind: str
    inputs_differ: bool | None
    why: list[str] = field(default_factory=list)
    element: Element | None = None


def explain(first: Divergence | Misfit, ours: Side, theirs: Side) -> Finding:
    """Class and cause of the first difference."""
    if isinstance(first, Misfit):
        return Finding("structure", None, [_of_misfit(first, ours, theirs)])
    finding = _classify(first, ours, theirs)
    finding.element = first_element(first, ours, theirs)
    return finding


def _classify(d: Divergence, ours: Side, theirs: Side) -> Finding:
    names = ours.name, theirs.name
    if d.kinds("position"):
        f = d.kinds("position")[0]
        seen = ", ".join(f"{side} takes it for position {value}" for side, value in zip(names, (f.ours, f.theirs)))
        return Finding("state", bool(d.kinds("in")), [f"the op is told another position on one side: {seen}; the token is at {d.position}"])
    if d.kinds("sampling"):
        what = ", ".join(f.name for f in d.kinds("sampling"))
        return Finding("sampling", bool(d.kinds("in")), [f"{what}: the two sides were given other values for this token"])
    if d.kinds("missing"):
        f = d.kinds("missing")[0]
        lacks = names[0] if f.ours is None else names[1]
        return Finding("structure", False, [f"argument {f.name} is not given on the {lacks}: what computes or passes it is missing there"])
    if d.kinds("in"):
        what = ", ".join(f.name for f in d.kinds("in"))
        return Finding(
            "structure",
            True,
            [
                f"input {what} differs, and every op before it agrees: something outside the op library changed it on one side, between "
                "the op that made it and this one; `isoexec audit` lists what computes outside ops"
            ],
        )
    if "layers" in (ours.level, theirs.level):
        return Finding("unknown", None, ["only the residual stream was recorded; record at level ops for the op and the cause"])
    return _same_inputs(d, ours, theirs)


def _same_inputs(d: Divergence, ours: Side, theirs: Side) -> Finding:
    """The inputs agree and the outputs do not."""
    where = tuple(d.where)
    weights = [w for w in _weights(where, ours, theirs)]
    if weights:
        return Finding("weights", False, weights)
    history = d.kinds("history")
    dirty = _dirty_state(d, ours) or _dirty_state(d, theirs)
    if history or dirty:
        why = (
            [dirty]
            if dirty
            else ["what the op reads of earlier tokens (its cache, window or mask) differs, although it was given the same"]
        )
        return Finding("state", False, why)
    constants = _constants(where, ours, theirs)
    why = [f"the op computes something else from the same inputs: {', '.join(constants)}"] if constants else [
        "the op computes other bits from the same inputs and the same weights"
    ]  # fmt: skip
    if not constants and "state" not in (ours.level, theirs.level) and d.where.stage in ("attention", "gdn.core", "gdn.conv1d"):
        why.append("caches and states were not recorded, so one of them may be the cause; record at level state to know")
    return Finding("op", False, why)


def _weights(where: tuple, ours: Side, theirs: Side) -> list[str]:
    found = []
    a, b = ours.weights.get(where, {}), theirs.weights.get(where, {})
    for name in sorted(a.keys() & b.keys()):
        if weights_differ(a[name], b[name]):
            shown = (f"{side.name} {w[name]['dtype']}{w[name]['shape']} {w[name]['digest']}" for side, w in ((ours, a), (theirs, b)))
            found.append(f"parameter {name} differs: {', '.join(shown)}")
    return found


def _constants(where: tuple, ours: Side, theirs: Side) -> list[str]:
    a, b = ours.constants.get(where, {}), theirs.constants.get(where, {})
    return [
        f"{name} is {a[name]} on the {ours.name} and {b[name]} on the {theirs.name}"
        for name in sorted(a.keys() & b.keys())
        if a[name] != b[name]
    ]


def _dirty_state(d: Divergence, side: Side) -> str | None:
    """A state of the token's sequence that was read otherwise than it had been written."""
    written: dict[int, str] = {}
    for layer, what, sequence, position, digest in side.states:
        if (layer, sequence) != (d.where.layer, d.sequence) or position > d.position + 1:
            continue
        if what == "written":
            written[position] = digest
        elif written.get(position, digest) != digest:
            return (
                f"the state that the {side.name} reads at position {position} is not the one that it wrote there: something changed it "
                "between two steps"
            )
    return None


def _of_misfit(m: Misfit, ours: Side, theirs: Side) -> str:
    def named(stage):
        return "nothing more" if stage is None else f"{stage[0]} (number {stage[1]})"

    after = f"after {m.before[0]}" if m.before else "at the beginning"
    text = f"{layer_name(m.layer)}, {after}: the {ours.name} runs {named(m.ours)}, the {theirs.name} runs {named(m.theirs)}"
    if m.extra:
        more, fewer = (ours.name, theirs.name) if m.extra == "ours" else (theirs.name, ours.name)
        text += f"; the {more} runs more ops there than the {fewer}"
    return text


def first_element(d: Divergence, ours: Side, theirs: Side) -> Element | None:
    """First element that differs, from rows that were kept whole; None where they were not."""
    rows = [_kept(d, side, case) for side, case in zip((ours, theirs), d.cases)]
    for f in d.fields:
        pair = [row.get(f.name) for row in rows]
        if all(pair) and pair[0]["dtype"] == pair[1]["dtype"] and pair[0]["shape"] == pair[1]["shape"]:
            element = _first_of(f.name, *pair)
            if element is not None:
                return element
    return None


def _kept(d: Divergence, side: Side, case: str) -> dict[str, dict]:
    key = (*d.where, d.sequence, d.position)
    return {
        t["field"]: t
        for t in side.tensors
        if (t["layer"], t["stage"], t["occurrence"], t["sequence"], t["position"]) == key and t["case"] == case
    }


def _first_of(name: str, a: dict, b: dict) -> Element | None:
    dtype, code = a["dtype"], _INTEGER[a["dtype"]]
    bits = [[value for (value,) in struct.iter_unpack(code, t["data"])] for t in (a, b)]
    differing = [i for i, (x, y) in enumerate(zip(*bits)) if x != y]
    if not differing:
        return None
    values = [[_value(dtype, x) for x in side] for side in bits]
    sizes = [abs(values[0][i] - values[1][i]) for i in differing if _finite(values[0][i]) and _finite(values[1][i])]
    first, width = differing[0], struct.calcsize(code)
    index, rest = [], first
    for length in reversed(a["shape"]):
        index.append(rest % length)
        rest //= length
    return Element(
        field=name,
        index=tuple(reversed(index)),
        values=(repr(values[0][first]), repr(values[1][first])),
        bits=tuple(f"0x{side[first]:0{2 * width}x}" for side in bits),
        ulps=_ulps(dtype, bits[0][first], bits[1][first], 8 * width),
        differing=len(differing),
        of=len(bits[0]),
        largest=float(max(sizes)) if sizes else None,
    )


def _value(dtype: str, bits: int):
    if dtype == "bfloat16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return struct.unpack(_VALUE[dtype], struct.pack(_INTEGER[dtype], bits))[0]


def _finite(value) -> bool:
    return value == value and value not in (float("inf"), float("-inf"))


def _ulps(dtype: str, a: int, b: int, width: int) -> int | None:
    if "float" not in dtype or not all(_finite(_value(dtype, x)) for x in (a, b)):
        return None
    sign = 1 << (width - 1)
    ordered = [-(v ^ sign) if v & sign else v for v in (a, b)]
    return abs(ordered[0] - ordered[1])
