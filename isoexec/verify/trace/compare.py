"""Align two sides by sequence and position and find the first difference in execution order. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from isoexec.verify.trace.bundle import EMBEDDING, HEAD, Bundle, Sequence, Side, Stream

#: Exit status by verdict, as `isoexec verify` has them.
STATUS = {"identical": 0, "divergent": 1, "bad input": 2, "inconclusive": 3}
_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}


class Stage(NamedTuple):
    """A stage of a layer: ``stage`` for the ``occurrence``-th time in it."""

    layer: int
    stage: str
    occurrence: int


class Field(NamedTuple):
    """An argument or result that differs. ``ours`` or ``theirs`` is None where only the other side has it."""

    name: str
    kind: str
    ours: int | None
    theirs: int | None


@dataclass(frozen=True)
class Divergence:
    """A token at a stage that differs.

    Attributes:
        where: the stage.
        order: its place in the layer.
        sequence, position: the token.
        cases: of both sides.
        ops: that ran, of both sides.
        fields: what differs.
    """

    where: Stage
    order: int
    sequence: int
    position: int
    cases: tuple[str, str]
    ops: tuple[tuple[str, ...], tuple[str, ...]]
    fields: tuple[Field, ...]

    def kinds(self, kind: str) -> tuple[Field, ...]:
        """Fields of one kind."""
        return tuple(f for f in self.fields if f.kind == kind)


@dataclass(frozen=True)
class Misfit:
    """A layer whose two sides run other stages: from ``order`` on one has ``ours``, the other ``theirs`` (None: nothing more).

    Attributes:
        extra: side ("ours", "theirs") that has a stage too many, or None where a stage stands for another.
        before: the last stage that both have, or None.
    """

    layer: int
    order: int
    ours: tuple[str, int] | None
    theirs: tuple[str, int] | None
    extra: str | None
    before: tuple[str, int] | None


@dataclass
class Compared:
    """Everything that a comparison found.

    Attributes:
        first: the first difference, or None.
        rows: token rows compared, over stages and cases.
        stages: stages compared.
        tokens: tokens of which something was compared.
        heat: layer -> token (sequence, position) -> whether it differs there.
        different: tokens that differ anywhere.
        misfits: layers that run other stages.
        notes: what a reader has to know, one sentence each.
        pairs: pairs of cases compared.
    """

    first: Divergence | Misfit | None = None
    rows: int = 0
    stages: int = 0
    heat: dict[int, dict[tuple[int, int], bool]] = field(default_factory=dict)
    misfits: list[Misfit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pairs: set[tuple[str, str]] = field(default_factory=set)

    @property
    def tokens(self) -> set[tuple[int, int]]:
        return {token for tokens in self.heat.values() for token in tokens}

    @property
    def different(self) -> set[tuple[int, int]]:
        return {token for tokens in self.heat.values() for token, differs in tokens.items() if differs}


def compare(ours: Side, theirs: Side) -> Compared:
    """Compare two sides whose sequences have the same numbers."""
    found = Compared()
    order = _orders(ours, theirs)
    candidates: list[tuple[tuple, Divergence | Misfit]] = []
    for where, left, right in _stage_pairs(ours, theirs):
        found.stages += 1
        for case, stream in left.items():
            for other_case, other in right.items():
                first = _compare_streams(found, where, order.get(where, stream.order), (case, stream), (other_case, other), (ours, theirs))
                if first is not None:
                    candidates.append(((where.layer, first.order, 1, first.sequence, first.position), first))
    found.misfits = list(_misfits(ours, theirs))
    candidates += [((m.layer, _rank(m, candidates), 0, -1, -1), m) for m in found.misfits]
    if candidates:
        found.first = min(candidates, key=lambda candidate: candidate[0])[1]
    _note_unaligned(found, ours, theirs)
    return found


def _stage_pairs(ours: Side, theirs: Side) -> Iterator[tuple[Stage, dict[str, Stream], dict[str, Stream]]]:
    """Stages that both sides recorded, with their streams by case."""
    by_stage: tuple[dict, dict] = ({}, {})
    for side, stages in zip((ours, theirs), by_stage):
        for (case, *where), stream in side.streams.items():
            stages.setdefault(Stage(*where), {})[case] = stream
    for where in sorted(by_stage[0].keys() & by_stage[1].keys()):
        yield where, by_stage[0][where], by_stage[1][where]


def _orders(ours: Side, theirs: Side) -> dict[Stage, int]:
    """Place of each stage in its layer, as the side that runs more of them has it."""
    order: dict[Stage, int] = {}
    for side in (ours, theirs):
        for (_, layer), lists in side.lists.items():
            for stages in lists:
                for index, (stage, occurrence) in enumerate(stages):
                    where = Stage(layer, stage, occurrence)
                    order[where] = max(order.get(where, 0), index)
    return order


def _compare_streams(found: Compared, where: Stage, order: int, left, right, sides) -> Divergence | None:
    """Compare the tokens that both streams hold; the first one that differs."""
    (case, ours), (other_case, theirs) = left, right
    names, alone = _comparable(ours, theirs, sides)
    at = {token: row for row, token in enumerate(zip(theirs.sequence, theirs.position))}
    heat = found.heat.setdefault(where.layer, {})
    columns = [(name, kind, ours.fields[name][3], theirs.fields[name][3]) for name, kind in names]
    decisive = [(a, b) for _, kind, a, b in columns if kind != "history"]
    first = None
    for row, token in enumerate(zip(ours.sequence, ours.position)):
        other = at.get(token)
        if other is None:
            continue
        found.rows += 1
        differs = bool(alone)
        for a, b in decisive:
            if a[row] != b[other]:
                differs = True
                break
        heat[token] = heat.get(token, False) or differs
        if differs and (first is None or token < first[0]):
            first = token, row, other
    if at and any(token in at for token in zip(ours.sequence, ours.position)):
        found.pairs.add((case, other_case))
    if first is None:
        return None
    token, row, other = first
    fields = [Field(name, kind, a[row], b[other]) for name, kind, a, b in columns if a[row] != b[other]] + alone
    return Divergence(where, order, *token, (case, other_case), (ours.ops, theirs.ops), tuple(fields))


def _comparable(ours: Stream, theirs: Stream, sides) -> tuple[list[tuple[str, str]], list[Field]]:
    """Fields that both streams have in one width, and inputs that one of them lacks. A width that differs is a layout's: parts of a row."""
    names, alone = [], []
    for name in dict.fromkeys([*ours.fields, *theirs.fields]):
        a, b = ours.fields.get(name), theirs.fields.get(name)
        if a is not None and b is not None:
            if a[2] // _ELEMENT.get(a[1], 1) == b[2] // _ELEMENT.get(b[1], 1):
                names.append((name, a[0]))
        elif (a or b)[0] != "in" or not _as_coarse(*sides):
            continue
        elif name not in (sides[0] if a is None else sides[1]).unplaced and _same_ops(ours, theirs):
            alone.append(Field(name, "missing", None if a is None else 1, None if b is None else 1))
    return names, alone


def _same_ops(ours: Stream, theirs: Stream) -> bool:
    """Whether the streams are the same op's: only then do they have the same arguments."""
    return bool(set(ours.ops) & set(theirs.ops))


def _as_coarse(ours: Side, theirs: Side) -> bool:
    """Whether both sides looked at the same things: a recording of level layers has seen neither every op nor what they read."""
    return (ours.level == "layers") == (theirs.level == "layers")


def _misfits(ours: Side, theirs: Side) -> Iterator[Misfit]:
    """Layers in which no pass of one side runs the stages of a pass of the other."""
    if not _as_coarse(ours, theirs):
        return
    layers = [{layer for _, layer in side.lists} for side in (ours, theirs)]
    for layer in sorted(layers[0] | layers[1]):
        lists = [[stages for (_, at), found in side.lists.items() if at == layer for stages in found] for side in (ours, theirs)]
        if all(lists):
            if not any(a == b for a in lists[0] for b in lists[1]):
                yield _misfit(layer, lists[0][0], lists[1][0])
            continue
        lacking = layers[1] if lists[0] else layers[0]
        if lacking and min(lacking) < layer < max(lacking):  # else it is another pipeline stage's
            yield Misfit(layer, 0, *(_first(found) for found in lists), "ours" if lists[0] else "theirs", None)


def _first(lists: list) -> tuple[str, int] | None:
    return lists[0][0] if lists and lists[0] else None


def _misfit(layer: int, ours: list, theirs: list) -> Misfit:
    names = [[stage for stage, _ in side] for side in (ours, theirs)]
    order = next((i for i, (a, b) in enumerate(zip(*names)) if a != b), min(map(len, names)))
    a, b = (side[order] if order < len(side) else None for side in (ours, theirs))
    extra = None
    if len(ours) != len(theirs):
        extra = "ours" if len(ours) > len(theirs) else "theirs"
    return Misfit(layer, order, a, b, extra, ours[order - 1] if order else None)


def _rank(misfit: Misfit, candidates: list) -> int:
    """Place of a misfit among the values of its layer: before every value that the shift of a repeated stage may have touched."""
    moved = {stage for stage in (misfit.ours and misfit.ours[0], misfit.theirs and misfit.theirs[0]) if stage}
    orders = [key[1] for key, found in candidates if key[0] == misfit.layer and found.where.stage in moved]
    return min([misfit.order, *orders])


def _note_unaligned(found: Compared, ours: Side, theirs: Side) -> None:
    for side in (ours, theirs):
        if side.unplaced:
            what = ", ".join(f"{name} ({count} times)" for name, count in sorted(side.unplaced.items()))
            found.notes.append(f"{side.name}: rows of {what} are not the pass's tokens (spread over ranks), and were not compared")
    changed = [
        f"{stage[1]} {name} of {layer_name(stage[0])}"
        for stage in sorted(ours.weights.keys() & theirs.weights.keys())
        for name in ours.weights[stage].keys() & theirs.weights[stage].keys()
        if weights_differ(ours.weights[stage][name], theirs.weights[stage][name])
    ]
    if changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        found.notes.append(f"weights differ: {', '.join(changed[:4])}{more}")


def weights_differ(ours: dict, theirs: dict) -> bool:
    """Whether two digests of one parameter say that it differs; parts of a parameter (another shape) are not comparable."""
    return ours["shape"] == theirs["shape"] and (ours["digest"], ours["dtype"]) != (theirs["digest"], theirs["dtype"])


def layer_name(layer: int) -> str:
    """How a person calls a layer."""
    return {EMBEDDING: "before the layers", HEAD: "after the layers"}.get(layer, f"layer {layer}")


def aligned(first: Bundle, second: Bundle) -> tuple[Side, dict[int, Sequence], int]:
    """The side of ``second`` with the sequence numbers of ``first``, by equal tokens.

    Returns:
        (side, sequences that both hold, how many of the second's are not in the first).
    """
    numbers: dict[tuple, list[int]] = {}
    for number, sequence in first.sequences.items():
        numbers.setdefault((sequence.prompt, *sequence.tokens), []).append(number)
    renumbered, common = {}, {}
    for number, sequence in second.sequences.items():
        same = numbers.get((sequence.prompt, *sequence.tokens))
        if same:
            renumbered[number] = same.pop(0)
            common[renumbered[number]] = sequence
    [side] = second.sides
    for stream in side.streams.values():
        for row, number in enumerate(stream.sequence):
            stream.sequence[row] = renumbered.get(number, -1 - number)
    side.states = [(layer, what, renumbered.get(n, -1 - n), *rest) for layer, what, n, *rest in side.states]
    side.tensors = [t | {"sequence": renumbered.get(t["sequence"], -1 - t["sequence"])} for t in side.tensors]
    for number, sequence in common.items():
        sequence.logprobs = first.sequences[number].logprobs | sequence.logprobs
    return side, common, len(second.sequences) - len(common)
