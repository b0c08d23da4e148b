"""A comparison as a verdict, as JSON and as text. Standard library only."""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path

from isoexec.contract import ContractError
from isoexec.contract.identity import differences
from isoexec.contract.manifest import Manifest, differing
from isoexec.verify.trace.bundle import HEAD, Sequence, Side, read
from isoexec.verify.trace.causes import CLASSES, Finding, explain
from isoexec.verify.trace.compare import STATUS, Compared, Divergence, Misfit, Stage, aligned, compare, layer_name


@dataclass
class Report:
    """A comparison of two sides.

    Attributes:
        verdict: ``identical``, ``divergent`` or ``inconclusive``.
        sides: that were compared.
        sequences: that both hold.
        compared: what was compared, and the first difference.
        finding: its cause, or None.
        about: what the bundle says of itself.
        notes: sentences.
        logprobs: engine case -> differences of the tokens' logprobs in nats (first side minus second).
    """

    verdict: str
    sides: tuple[Side, Side]
    sequences: dict[int, Sequence]
    compared: Compared
    finding: Finding | None
    about: dict
    notes: list[str] = field(default_factory=list)
    logprobs: dict[str, list[float]] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """Exit status."""
        return STATUS[self.verdict]


def open_report(files: list[Path]) -> Report:
    """Compare the two sides of a bundle, or of two bundles with one side each.

    Raises:
        ContractError: a file is no bundle, or there are not two sides.
        OSError: it cannot be read.
    """
    bundles = [read(file) for file in files]
    sides = [side for bundle in bundles for side in bundle.sides]
    if len(sides) != 2:
        raise ContractError(
            f"{', '.join(map(str, files))}: expected two sides to compare, found {len(sides)} "
            f"({', '.join(s.name for s in sides) or 'none'}); name a bundle with two, or two bundles with one each"
        )
    if len(bundles) == 1:
        return report(sides[0], sides[1], bundles[0].sequences, bundles[0].about)
    side, common, other = aligned(*bundles)
    notes = [f"{other} sequences of {files[1]} are not in {files[0]}"] if other else []
    return report(sides[0], side, common, bundles[0].about, notes)


def report(ours: Side, theirs: Side, sequences: dict[int, Sequence], about: dict, notes: list[str] = ()) -> Report:
    """Compare two sides and judge."""
    compared = compare(ours, theirs)
    found = Report("identical", (ours, theirs), sequences, compared, None, about, [*notes, *compared.notes])
    found.notes += _contracts(ours, theirs) + _manifests(ours, theirs)
    found.logprobs = _logprobs(found)
    if compared.first is not None:
        found.verdict, found.finding = "divergent", explain(compared.first, ours, theirs)
    elif not compared.rows:
        found.verdict = "inconclusive"
        found.notes.insert(0, "no token was recorded by both sides at the same stage: nothing was compared")
    elif any(d != 0 for values in found.logprobs.values() for d in values):
        token = _first_unequal(found)
        found.verdict = "divergent"
        found.compared.first = Divergence(Stage(HEAD, "logprob.log_softmax", 0), 0, *token, ("", ""), ((), ()), ())
        why = "every recorded op agrees, and the logprobs that the two sides report do not: something outside the op library changed them"
        found.finding = Finding("structure", True, [why])
    return found


def _contracts(ours: Side, theirs: Side) -> list[str]:
    if ours.contract is None or theirs.contract is None:
        return [f"the {side.name} ran without a contract" for side in (ours, theirs) if side.contract is None]
    found = differences(ours.contract, theirs.contract)
    return [f"the contracts differ: {'; '.join(map(str, found[:3]))}"] if found else []


def _manifests(ours: Side, theirs: Side) -> list[str]:
    """Tensors of the checkpoint that the sides hold differently, by their names there."""
    held = [side.environment.get("weights") for side in (ours, theirs)]
    if not all(held):
        return []
    names = differing(*map(Manifest.from_data, held))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return [f"tensors of the checkpoint that differ: {', '.join(names[:4])}{more}"] if names else []


def _logprobs(r: Report) -> dict[str, list[float]]:
    """Differences of tokens that both sides scored, by the first side's case of the row they came from; NaN where a side is not finite."""
    case_of = {}
    for (case, layer, stage, _), stream in r.sides[0].streams.items():
        if layer == HEAD and stage == "logprob.log_softmax":
            case_of.update({token: case for token in zip(stream.sequence, stream.position)})
    found: dict[str, list[float]] = {}
    for token, a, b in _scores(r):
        difference = 0.0 if a == b else _float(a) - _float(b)
        found.setdefault(case_of.get(token, "not recorded"), []).append(difference if math.isfinite(difference) else math.nan)
    return found


def _scores(r: Report):
    """(token whose row it is, bits of both sides) of every generated token."""
    for number, sequence in sorted(r.sequences.items()):
        pair = [sequence.logprobs.get(side.name) for side in r.sides]
        if all(p is not None for p in pair):
            for i, (a, b) in enumerate(zip(*pair)):
                yield (number, sequence.prompt - 1 + i), a, b


def _first_unequal(r: Report) -> tuple[int, int]:
    return next(token for token, a, b in _scores(r) if a != b)


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def as_json(r: Report) -> dict:
    """JSON value of a report; floats of tensors are text, so that no printer rounds them."""
    ours, theirs = r.sides
    first, finding = r.compared.first, r.finding
    return {
        "verdict": r.verdict,
        "status": r.status,
        "sides": [{"name": s.name, "level": s.level, "cases": s.cases} for s in r.sides],
        "about": r.about,
        "compared": {
            "rows": r.compared.rows,
            "tokens": len(r.compared.tokens),
            "stages": r.compared.stages,
            "cases": sorted(map(list, r.compared.pairs)),
        },
        "different_tokens": len(r.compared.different),
        "class": None if finding is None else finding.kind,
        "first": None if first is None else _first_json(first, r),
        "inputs_differ": None if finding is None else finding.inputs_differ,
        "why": [] if finding is None else finding.why,
        "element": None if finding is None or finding.element is None else asdict(finding.element),
        "notes": r.notes,
        "logprobs": {case: _distribution(values) for case, values in sorted(r.logprobs.items())},
        "environments": {s.name: {k: v for k, v in s.environment.items() if k != "weights"} for s in (ours, theirs)},
    }


def _first_json(first: Divergence | Misfit, r: Report) -> dict:
    names = [side.name for side in r.sides]
    if isinstance(first, Misfit):
        runs = {name: None if stage is None else list(stage) for name, stage in zip(names, (first.ours, first.theirs))}
        return {"layer": first.layer, "order": first.order, "runs": runs, "sequence": None, "position": None}
    return {
        "layer": first.where.layer,
        "stage": first.where.stage,
        "occurrence": first.where.occurrence,
        "order": first.order,
        "ops": dict(zip(names, map(list, first.ops))),
        "cases": dict(zip(names, first.cases)),
        "sequence": first.sequence,
        "position": first.position,
        "fields": [{"name": f.name, "kind": f.kind} for f in first.fields],
    }


def _distribution(values: list[float]) -> dict:
    sizes = [abs(v) for v in values if v == v]
    return {
        "tokens": len(values),
        "equal": sum(v == 0 for v in values),
        "not_finite": len(values) - len(sizes),
        "mean": repr(math.fsum(sizes) / len(sizes)) if sizes else None,
        "max": repr(max(sizes)) if sizes else None,
    }


def lines(r: Report) -> list[str]:
    """The report as a person reads it."""
    ours, theirs = r.sides
    c = r.compared
    found = [f"{r.verdict.upper()}: {_headline(r)}"]
    if r.finding is not None:
        found += [f"  first      {where(r)}", *_inputs(r.finding)]
        found += [f"  why        {why}" for why in r.finding.why]
        if r.finding.element is not None:
            found += [f"  element    {text}" for text in element_lines(r)]
        found.append(f"  then       {len(c.different)} of {len(c.tokens)} tokens differ somewhere")
    pairs = "; ".join(f"{a} against {b}" for a, b in sorted(c.pairs)) or "no cases"
    found.append(f"  compared   {len(c.tokens)} tokens, {c.stages} stages, {c.rows} rows: {pairs} ({ours.name} against {theirs.name})")
    for case, values in sorted(r.logprobs.items()):
        d = _distribution(values)
        found.append(
            f"  logprobs   {case}: {d['equal']} of {d['tokens']} equal"
            + (f", largest difference {float(d['max']):.3e}" if d["max"] else "")
        )
    return found + [f"  note       {note}" for note in r.notes]


def _headline(r: Report) -> str:
    if r.finding is not None:
        return CLASSES[r.finding.kind]
    return "every digest agrees" if r.verdict == "identical" else "nothing can be said"


def _inputs(finding: Finding) -> list[str]:
    if finding.inputs_differ is None:
        return []
    return [
        "  inputs     differ already: the cause is before this op" if finding.inputs_differ else "  inputs     equal: the cause is here"
    ]


def where(r: Report) -> str:
    """Layer, op, token and cases of the first difference, in one line."""
    first = r.compared.first
    if isinstance(first, Misfit):
        return f"{layer_name(first.layer)}, place {first.order}"
    number = f" (number {first.where.occurrence})" if first.where.occurrence else ""
    ops = sorted({op for side in first.ops for op in side})
    also = f" [{', '.join(ops)}]" if ops and ops != [first.where.stage] else ""
    cases = f", {first.cases[0]} against {first.cases[1]}" if all(first.cases) else ""
    return f"{layer_name(first.where.layer)}, {first.where.stage}{number}{also}, {token_name(r, first)}{cases}"


def token_name(r: Report, first: Divergence) -> str:
    """The token with its place in its sequence."""
    sequence = r.sequences.get(first.sequence)
    if sequence is None or not 0 <= first.position < len(sequence.tokens):
        return f"sequence {first.sequence}, position {first.position}"
    part = "prompt" if first.position < sequence.prompt else "generated"
    token = sequence.tokens[first.position]
    return f"sequence {first.sequence}, position {first.position} of {len(sequence.tokens)} ({part}, token id {token})"


def element_lines(r: Report) -> list[str]:
    """The first differing element: values, bits, ulps, and how much of the row differs."""
    e, (ours, theirs) = r.finding.element, r.sides
    ulps = "" if e.ulps is None else f", {e.ulps} ulp{'' if e.ulps == 1 else 's'}"
    index = ", ".join(map(str, e.index))
    largest = "" if e.largest is None else f", largest difference {e.largest:.3e}"
    return [
        f"{e.field}[{index}]: {ours.name} {e.values[0]} ({e.bits[0]}), {theirs.name} {e.values[1]} ({e.bits[1]}){ulps}",
        f"{e.differing} of {e.of} elements of the row differ{largest}",
    ]
