"""The observer that records a digest of what each op reads and writes, for every token."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from isoexec.contract import ContractError
from isoexec.ops._core import registry
from isoexec.ops._core.registry import EMBEDDING, HEAD
from isoexec.ops._trace import context
from isoexec.ops._trace.captured import Captured, Replay
from isoexec.ops._trace.context import Rows
from isoexec.ops._trace.digest import column_digests, row_digests, weight_digest
from isoexec.ops._trace.stages import COARSE, STAGES, Read
from isoexec.ops._trace.streams import Stream, as_values, width

#: ``layers``: the residual stream and what follows the last layer, cheap enough for a whole run. ``ops``: what every op reads and writes; a
#: tensor that one op returns and another takes is read once. ``state``: also digests of caches and states, which reads a cache as often as
#: attention does; each argument is read when its op is called, so that a write in between shows.
LEVELS = ("layers", "ops", "state")


class Wanted(NamedTuple):
    """A token at a stage whose rows are to be kept whole."""

    layer: int
    stage: str
    occurrence: int
    sequence: int
    position: int


@dataclass
class _Visit:
    """A layer's pass: the stages it has run so far."""

    case: str
    stages: list[tuple[str, int]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    started: bool = False  # whether an op has run in it
    last: tuple | None = None  # (stage, occurrence, chunk, address of the input) that a next op may add to


class Recorder:
    """Records what the ops of one runtime do while it is installed (:func:`isoexec.ops._core.registry.observing`).

    The runtime says which rows a pass holds (:meth:`begin`, :meth:`select`, :meth:`idle`); layer and case come from the registry. A tensor
    with fewer rows than the pass is counted in ``unplaced`` and left out, as what a layout has spread over ranks.

    Args:
        level: one of :data:`LEVELS`.
        sequences: record these only (None: all).
        wanted: tokens to keep whole.
        numbers: number to record each of the runtime's sequences under (None: its own).
    """

    def __init__(
        self,
        level: str = "ops",
        sequences: Iterable[int] | None = None,
        wanted: Sequence[Wanted] = (),
        numbers: Sequence[int] | None = None,
    ):
        if level not in LEVELS:
            raise ContractError(f"trace: level: expected one of {', '.join(LEVELS)}, found {level!r}")
        self.level = level
        self._numbers = None if numbers is None else torch.tensor([*numbers, -1], dtype=torch.int64)  # -1, padding, finds the last
        self._sequences = None if sequences is None else torch.tensor(sorted(sequences), dtype=torch.int64)
        self._wanted: dict[tuple, set] = {}
        for w in wanted:
            self._wanted.setdefault(tuple(w[:3]), set()).add((w.sequence, w.position))
        self._stages = {op: tuple(r for r in reads if level != "layers" or r.stage in COARSE) for op, reads in STAGES.items()}
        self._rows: Rows | None = None
        self._outside = EMBEDDING  # the pseudo layer of ops that run in no layer
        self._current = self._previous = EMBEDDING
        self._visits: dict[int, _Visit] = {}
        self._known: dict = {}  # what a pass has read, so far as it may be read once
        self._capture: Captured | None = None
        self._replays: list[Replay] = []
        self.streams: dict[tuple, Stream] = {}
        self.lists: dict[tuple, dict[tuple, int]] = {}
        self.weights: dict[tuple, dict] = {}
        self.constants: dict[tuple, dict[str, str]] = {}
        self.states: list[tuple] = []
        self.tensors: list[dict] = []
        self.unplaced: dict[str, int] = {}

    # --- what the runtime says --------------------------------------------------------------------------------------------

    def begin(self, sequence: torch.Tensor, position: torch.Tensor, layer: int = EMBEDDING) -> None:
        """A pass over token rows starts.

        Args:
            sequence: [T] int64, which sequence each row belongs to; -1 for padding.
            position: [T] int64, absolute position of each row in it.
            layer: ``EMBEDDING``, or ``HEAD`` for a pass that starts after the last layer.
        """
        self._close_visits()
        self._outside = self._current = self._previous = layer
        self.select(sequence, position)

    def select(self, sequence: torch.Tensor, position: torch.Tensor) -> None:
        """The ops that follow in this pass get these rows, as the head gets some of a pass's tokens."""
        self._rows = Rows(sequence, position, None) if self._capture else self._rows_of(sequence, position)
        self._known = {}
        if self._capture:
            self._capture.part(self._rows)
        if self._current in self._visits:
            self._visits[self._current].last = None

    def _rows_of(self, sequence: torch.Tensor, position: torch.Tensor) -> Rows:
        sequence, position = sequence.cpu(), position.cpu()
        if self._numbers is not None:
            sequence = self._numbers[sequence]
        keep = sequence >= 0
        if self._sequences is not None:
            keep &= torch.isin(sequence, self._sequences)
        return Rows(sequence, position, None if bool(keep.all()) else keep.nonzero().squeeze(1))

    def idle(self) -> None:
        """The ops that follow are not recorded."""
        self._rows = None

    @property
    def can_capture(self) -> bool:
        """Whether passes can be captured: all that is asked for is read on the device."""
        return self.level != "state" and not self._wanted

    @contextlib.contextmanager
    def capturing(self):
        """The passes inside are captured in a CUDA graph, not run: inside ``torch.cuda.graph``, and within :func:`registry.observing`.

        :meth:`begin` and :meth:`select` are called as in a pass, with as many rows as the graph computes; whose they are is said at each
        replay (:meth:`replayed`). Yields the :class:`Captured`, which has to live as long as the graph.

        Raises:
            ContractError: what is asked for is read by host code, which a replay does not run.
        """
        if not self.can_capture:
            asked = "level state" if self.level == "state" else "rows kept whole"
            raise ContractError(f"trace: {asked}: expected level layers or ops in a captured pass; run the engine with enforce_eager")
        self._close_visits()
        own, self._capture = (self.streams, self.lists), Captured()
        self.streams, self.lists = self._capture.streams, self._capture.lists
        try:
            yield self._capture
            self._close_visits()
            self._capture.end()
        finally:
            (self.streams, self.lists), self._capture = own, None
            self._visits, self._known = {}, {}
            self.idle()

    def replayed(self, captured: Captured, *rows: tuple[torch.Tensor, torch.Tensor], goes_on: bool = False) -> None:
        """A graph with a captured pass was launched on the current stream; called before it is launched again.

        Args:
            captured: of that graph.
            rows: (sequence, position) for each :meth:`begin` and :meth:`select` of the captured pass; the graph's rows beyond are padding.
            goes_on: the pass goes on after its last layer, outside the graph, as an engine's does with its head.

        Raises:
            ContractError: other parts than the pass has, or more rows than a part holds.
        """
        counts = [len(part.sequence) for part, _ in captured.parts]
        found = [len(sequence) for sequence, _ in rows]
        if len(found) != len(counts) or any(n > count for n, count in zip(found, counts)):
            raise ContractError(
                f"trace: replay: expected rows for parts of at most {counts}, found {found}; name those of this graph's batch"
            )
        while captured.unread:
            self._weights(*captured.unread.pop(0))
        whose = [self._rows_of(*part) for part in rows]
        sheets = [[sheet.clone() for sheet in sheets] for _, sheets in captured.parts]
        self._replays.append(Replay(captured, whose, sheets, goes_on))
        if goes_on:
            self._go_on(captured, *rows[-1])

    def _go_on(self, captured: Captured, sequence: torch.Tensor, position: torch.Tensor) -> None:
        """What follows a replay belongs to the visit of the head that the captured pass began."""
        self._close_visits()
        self._outside = self._current = self._previous = HEAD
        for (case, layer), found in captured.lists.items():
            for stages in found if layer == HEAD else ():
                self._visits[HEAD] = _Visit(case, list(stages), {stage: n + 1 for stage, n in stages}, started=True)
        self.select(sequence, position)

    # --- what the registry shows ------------------------------------------------------------------------------------------

    def before(self, declaration, args, kwargs):
        case, name = registry.current_case(), declaration.name
        if case is None or self._rows is None or name not in STAGES:
            return None
        visit = self._enter(case)
        opens, visit.started = not visit.started, True
        reads = self._stages[name]
        if not reads or (self._rows.keep is not None and not len(self._rows.keep)):
            return None
        if not case.startswith("engine") and name == "logprob.log_softmax":
            return None  # the trainer's scorer takes one token's logprob; whole rows are a check beside it
        if name == "collective.column_parallel_input" and self._current == HEAD:
            return None  # moves what one rank alone does not move, and one runtime does not ask for it
        a = {**declaration.defaults, **dict(zip(declaration.parameters, args)), **kwargs}
        return name, a, opens, [self._inputs(read, a) for read in reads], self._pieces(reads[-1], a, before=True)

    def after(self, seen, result) -> None:
        if seen is None:
            return
        name, a, opens, inputs, pieces = seen
        results = result if isinstance(result, tuple) else (result,)
        for read, found in zip(self._stages[name], inputs):
            # The sum that ends a layer may be taken where the next one begins.
            ends = opens and read.stage == "norm.residual_add" and self._previous in self._visits
            self._record(name, read, a, found, results, self._previous if ends else self._current)
        if pieces:
            self._pieces(self._stages[name][-1], a, before=False)

    # --- recording --------------------------------------------------------------------------------------------------------

    def _enter(self, case: str) -> _Visit:
        layer = registry.current_layer()
        if layer is None:
            layer = self._outside
        else:
            self._outside = HEAD
        visit = self._visits.get(layer)
        if layer == self._current and visit is not None and visit.case == case:
            return visit
        if self._capture:
            self._capture.flush()
        if visit is not None and (layer, case) != (HEAD, visit.case):
            self._close(layer)  # recomputation visits a layer again
        self._previous, self._current = self._current, layer
        return self._visits.setdefault(layer, _Visit(case))

    def _inputs(self, read: Read, a: dict) -> dict[str, tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Field -> (kind, its digests, the rows themselves)."""
        rows, found = self._rows, {}
        if self.level == "layers":
            return found
        if read.positions is not None:
            found["position"] = ("position", self._positions(read, a), None)
        for name in read.sampling:
            value = a[name]
            if not value.is_floating_point():
                value = value.to(torch.int64)
            value = self._cut(value.reshape(-1) if value.dim() else value.expand(len(rows.sequence)))
            found[name] = ("sampling", self._digests(value), value)
        for name in read.inputs:
            if a.get(name) is not None:
                value = self._cut(a[name])
                found[name] = ("in", self._once(a[name], value), value)
        if self.level == "state" and read.history is not None:
            found["history"] = ("history", self._cut(read.history(a, rows)), None)
        return found

    def _record(self, op: str, read: Read, a: dict, found: dict, results: tuple, layer: int) -> None:
        visit = self._visits[layer]
        outputs = {name: value for name, value in zip(read.outputs, results) if name}
        if op == "sampling.draw":
            outputs["logprob"] = a["logprobs"].gather(1, results[0].unsqueeze(1))
        address = (a["x"].data_ptr(), a["x"].shape) if read.free else None
        occurrence, chunk, joins = self._place(visit, read, {*found, *outputs}, address)
        free = read.free and occurrence == 0 and layer not in (EMBEDDING, HEAD)
        stream = self.streams.setdefault((visit.case, layer, read.stage, occurrence), Stream(len(visit.stages)))
        stream.ops[op] = None
        for name, index in read.results.items():
            if self.level != "layers":
                value = self._cut(results[index])
                found[name] = ("in", self._once(results[index], value), value)
        for name, result in outputs.items():
            value = self._cut(result)
            kind = "sampling" if op == "sampling.draw" and name == "tokens" else "out"
            digests = self._digests(value, free) if free else self._once(result, value, new=True)
            found[name] = (kind, digests, value)
        key = layer, read.stage, occurrence
        self._add(stream, chunk, found, joins)
        if self.level != "layers":
            self._parameters(key, read, a, free, joins)
        if key in self._wanted:
            self._keep_whole(key, visit.case, found)

    def _place(self, visit: _Visit, read: Read, names: set[str], address) -> tuple[int, dict, bool]:
        """(occurrence, chunk, whether it joins a product of the same input) of the stage that an op is about to record."""
        if visit.last is not None and visit.last[0] == read.stage:
            stage, occurrence, chunk, before = visit.last
            joins = address is not None and address == before
            if joins or (address is None and not names & chunk.keys()):
                return occurrence, chunk, joins
        occurrence = visit.counts.get(read.stage, 0)
        visit.counts[read.stage] = occurrence + 1
        visit.stages.append((read.stage, occurrence))
        chunk: dict[str, torch.Tensor] = {}
        visit.last = read.stage, occurrence, chunk, address
        return occurrence, chunk, False

    def _add(self, stream: Stream, chunk: dict, found: dict, joins: bool) -> None:
        new = not chunk
        for name, (kind, digests, value) in found.items():
            if digests is None:
                self.unplaced[name] = self.unplaced.get(name, 0) + 1
                continue
            if joins and name in chunk:
                if kind == "out":
                    chunk[name] = self._capture.add(chunk[name], digests) if self._capture else chunk[name] + digests
                    if len(stream.chunks) == 1:
                        stream.fields[name]["width"] += width(value)
                continue
            chunk[name] = digests
            if name not in stream.fields:
                dtype = "int64" if value is None else str(value.dtype).removeprefix("torch.")
                stream.fields[name] = {"kind": kind, "dtype": dtype, "width": 8 if value is None else width(value)}
        if new and chunk:
            stream.chunks.append((self._rows, chunk))

    def _parameters(self, key: tuple, read: Read, a: dict, free: bool, joins: bool) -> None:
        weights = {name: a[name] for name in read.weights if a.get(name) is not None}
        if self._capture:
            self._capture.unread.append((key, weights, free, joins))
        else:
            self._weights(key, weights, free, joins)
        constants = self.constants.setdefault(key, {})
        for name in read.constants:
            if name in a and name not in constants:
                constants[name] = _constant(a[name])
        for name in ("plan", "pool") if read.stage == "gdn.core" else ():
            if name in a:
                constants["chunk"] = str(a[name].chunk)

    def _weights(self, key: tuple, weights: dict, free: bool, joins: bool) -> None:
        """Digests of parameters: of each once, which waits for the device."""
        known = self.weights.setdefault(key, {})
        for name, weight in weights.items():
            if name in known and (not joins or weight.data_ptr() in known[name]["parts"]):
                continue
            digest = int(weight_digest(weight, ordered=not free)) % (1 << 64)
            shape, dtype = _shape(weight)
            if joins and name in known:
                digest = (digest + known[name]["digest"]) % (1 << 64)
                shape = [known[name]["shape"][0] + shape[0], *shape[1:]]
                known[name] |= {"digest": digest, "shape": shape, "parts": known[name]["parts"] | {weight.data_ptr()}}
            else:
                parts = {weight.data_ptr()} if isinstance(weight, torch.Tensor) else set()
                known[name] = {"digest": digest, "shape": shape, "dtype": dtype, "parts": parts}

    def _pieces(self, read: Read, a: dict, before: bool) -> list | None:
        if self.level != "state" or read.pieces is None:
            return None
        pieces = read.pieces(a)
        for row, slot, start, end in pieces:
            sequence, at = int(self._rows.sequence[row]), start if before else end
            wanted = self._sequences is None or sequence in self._sequences
            if sequence >= 0 and at and wanted:
                what = "read" if before else "written"
                self.states.append((registry.current_layer(), what, sequence, at, context.state_digest(a["pool"], slot, at)))
        return pieces

    def _keep_whole(self, key: tuple, case: str, found: dict) -> None:
        rows = self._rows
        sequence, position = (x if rows.keep is None else x[rows.keep] for x in rows[:2])
        for index, token in enumerate(zip(sequence.tolist(), position.tolist())):
            if token in self._wanted[key]:
                for name, (kind, _, value) in found.items():
                    if value is not None:
                        row = value[index].detach().cpu().contiguous()
                        dtype = str(row.dtype).removeprefix("torch.")
                        data = row.reshape(-1).view(torch.uint8).numpy().tobytes()
                        self.tensors.append(
                            dict(zip(("layer", "stage", "occurrence"), key))
                            | {"case": case, "sequence": token[0], "position": token[1], "field": name, "kind": kind}
                            | {"dtype": dtype, "shape": list(row.shape), "data": data}
                        )

    def _digests(self, value: torch.Tensor | None, free: bool = False) -> torch.Tensor | None:
        """[T] digests of rows; None where they are not the pass's."""
        if value is None:
            return None
        if not self._capture:
            return column_digests(value.flatten(1)) if free else row_digests(value)
        if free:
            return self._capture.written(value.device, lambda row: column_digests(value.flatten(1), row), value)
        return self._capture.digests(value)

    def _once(self, tensor: torch.Tensor, value: torch.Tensor | None, new: bool = False) -> torch.Tensor | None:
        """:meth:`_digests` of ``value``, the recorded rows of ``tensor``; below level ``state`` those that are known of the same object."""
        known = None if new or self.level == "state" else self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        found = self._digests(value)
        self._known[id(tensor)] = weakref.ref(tensor), found
        return found

    def _positions(self, read: Read, a: dict) -> torch.Tensor | None:
        """Positions of the recorded rows as an op sees them; below level ``state`` found once for a pass."""
        sources = [a[name] for name in read.positions.reads]
        key = read.positions, *map(id, sources)
        if self.level != "state" and key in self._known:
            return self._known[key][1]
        found = self._cut(read.positions(a, self._rows).to(torch.int64))
        if found is not None:  # a runtime reuses its buffers
            found = self._capture.written(found.device, lambda row, x=found: row.copy_(x), found) if self._capture else found.clone()
        self._known[key] = sources, found  # held, so that an id stays one object's
        return found

    def _cut(self, x: torch.Tensor) -> torch.Tensor | None:
        """Rows of ``x`` to record; an engine's padding lies at the end. None: it does not hold the pass's rows."""
        count = len(self._rows.sequence)
        if x.shape[0] < count or (x.shape[0] > count and not registry.current_case().startswith("engine")):
            return None
        x = x.detach()
        if x.shape[0] > count:
            x = x[:count]
        return x if self._rows.keep is None else x[self._rows.keep.to(x.device)]

    def _close_visits(self) -> None:
        for layer in list(self._visits):
            self._close(layer)

    def _close(self, layer: int) -> None:
        visit = self._visits.pop(layer)
        lists = self.lists.setdefault((visit.case, layer), {})
        stages = tuple(visit.stages)
        lists[stages] = lists.get(stages, 0) + 1

    def _unfold(self, replay: Replay) -> None:
        """Add what a replay wrote, as if its pass had run here."""
        columns: dict[tuple, dict[int, list]] = {}
        for column in replay.captured.columns:
            columns.setdefault(column.stream, {}).setdefault(column.part, []).append(column)
        for key, template in replay.captured.streams.items():
            stream = self.streams.setdefault(key, Stream(template.order))
            stream.ops |= template.ops
            for name, about in template.fields.items():
                stream.fields.setdefault(name, about)
            stream.chunks += [replay.chunk(part) for part in columns[key].values()]
        for place, found in replay.captured.lists.items():
            if replay.goes_on and place[1] == HEAD:
                continue  # counted with the stages that followed
            own = self.lists.setdefault(place, {})
            for stages, passes in found.items():
                own[stages] = own.get(stages, 0) + passes

    # --- the result -------------------------------------------------------------------------------------------------------

    def finish(self) -> dict:
        """What was recorded, as JSON values and raw little-endian bytes (under ``data``, ``sequence``, ``position``).

        Returns:
            ``streams``, ``lists`` (stages of a layer, in order), ``weights``, ``constants``, ``states``, ``tensors``, ``unplaced``
            and ``level``.
        """
        self._close_visits()
        self._rows = None
        for replay in self._replays:
            self._unfold(replay)
        self._replays = []
        return {
            "level": self.level,
            "streams": [as_values(key, stream) for key, stream in self.streams.items() if stream.chunks],
            "lists": [
                {"case": case, "layer": layer, "stages": [list(s) for s in stages], "passes": passes}
                for (case, layer), found in self.lists.items()
                for stages, passes in found.items()
            ],
            "weights": [
                dict(zip(("layer", "stage", "occurrence"), key))
                | {"name": name, "shape": w["shape"], "dtype": w["dtype"], "digest": f"0x{w['digest']:016x}"}
                for key, found in self.weights.items()
                for name, w in found.items()
            ],
            "constants": [
                dict(zip(("layer", "stage", "occurrence"), key)) | {"values": values} for key, values in self.constants.items() if values
            ],
            "states": [
                {"layer": layer, "what": what, "sequence": sequence, "position": position, "digest": f"0x{digest:016x}"}
                for layer, what, sequence, position, digest in self.states
            ],
            "tensors": self.tensors,
            "unplaced": self.unplaced,
        }


def _shape(weight) -> tuple[list[int], str]:
    if isinstance(weight, (list, tuple)):
        shape, dtype = _shape(weight[0])
        return [len(weight), *shape], dtype
    return list(weight.shape), str(weight.dtype).removeprefix("torch.")


def _constant(value) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)
