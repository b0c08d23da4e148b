"""Watches a process: every op that torch dispatches and every Triton kernel that is launched, by case, layer and call site."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from isoexec.ops._core import registry
from isoexec.verify.audit import launches, rules
from isoexec.verify.audit.rules import Kind

#: Ops whose result is a logprob.
_LOGPROB_OPS = ("logprob.log_softmax", "logprob.token_logprob")
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Stray(NamedTuple):
    """An op on the logprob path that no isoexec op issued.

    Attributes:
        case: that ran it.
        layer: decoder layer, counted from 0; None outside the layers.
        op: e.g. ``aten.mul.Tensor``, ``triton.<kernel>``, ``kernel.<name>``.
        kind: ``arithmetic``, ``cast``, ``decision``, ``kernel``, ``re-entry`` (an isoexec op that reads what was declared to lie beyond
            the logprob) or ``origin`` (a result that no logprob op gave).
        dtypes: of the floating-point tensors, read -> written.
        file, line, function: innermost frame outside torch.
    """

    case: str
    layer: int | None
    op: str
    kind: str
    dtypes: str
    file: str
    line: int
    function: str


class Recorder(TorchDispatchMode):
    """A dispatch mode that lists stray ops. ``with recorder.observing():`` around what computes logprobs; moves no bit.

    Args:
        case: what a call counts for that runs in no case of the registry: what happens before, between and after the ops.
    """

    def __init__(self, case: Callable[[], str]):
        super().__init__()
        self._case = case
        self._finished: set[StorageWeakRef] = set()  # logprobs, and copies of them
        self._blank: set[StorageWeakRef] = set()  # constants, to be filled
        self._beyond: set[StorageWeakRef] = set()  # losses, gradients and what follows from them
        self.strays: Counter[Stray] = Counter()
        self.inside: Counter[str] = Counter()  # dispatched calls that an isoexec op issued, by case
        self.outside: Counter[tuple[str, str, str]] = Counter()  # floating-point calls that none did, by (case, op, kind)

    @contextlib.contextmanager
    def observing(self):
        """Watch the calling thread (and autograd's, which inherit it) until the block ends."""
        with launches.triton_launches(self._launched), launches.device_kernels(self._unexplained), self:
            yield

    def expect_logprob(self, x: torch.Tensor) -> None:
        """List ``x``, which a runtime hands out, if it is anything but the result of a logprob op, moved."""
        if any(storage not in self._finished or storage in self._beyond for storage in _storages(x)):
            self._add("result", "origin", str(x.dtype).removeprefix("torch."))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        op = registry.current_op()
        if op is None and rules.is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if op is None:
            self._issued_outside(func, args, kwargs, result)
        else:
            self._issued_inside(op, func, args, kwargs, result)
        return _without_holes(result)

    def _issued_inside(self, op: str, func, args, kwargs, result) -> None:
        if _in_backward() or registry.is_beyond_logprob():
            self._mark_beyond(func, args, kwargs, result)
            return
        self.inside[self._current_case()] += 1
        read = _storages(args, kwargs)
        if rules.rewrites_values(func):
            self._blank.difference_update(read)
        if any(storage in self._beyond for storage in read):
            self._add(op, "re-entry", _dtypes(args, kwargs, result))
        if op in _LOGPROB_OPS:
            self._finished.update(storage for storage in _storages(result) if storage not in read)

    def _issued_outside(self, func, args, kwargs, result) -> None:
        kind = rules.kind_of(func, args, kwargs, result)
        if kind is Kind.NO_FLOAT:
            return
        read = _storages(args, kwargs)
        if _in_backward() or registry.is_beyond_logprob() or any(storage in self._beyond for storage in read):
            self._mark_beyond(func, args, kwargs, result)
            return
        self.outside[self._current_case(), str(func), kind.value] += 1
        written = _storages(result)
        of_logprobs = any(x in self._finished for x in read) and all(x in self._finished or x in self._blank for x in read)
        if of_logprobs and kind in (Kind.MOVEMENT, Kind.DECISION):
            self._finished.update(written)
        elif kind is Kind.CONSTANT:
            self._blank.update(x for x in written if x not in read)
        elif kind is Kind.MOVEMENT:
            if rules.rewrites_values(func):
                self._finished.difference_update(written)
                self._blank.difference_update(written)
        else:
            self._add(str(func), kind.value, _dtypes(args, kwargs, result))
            if of_logprobs:  # the culprit is named; what goes on reading logprobs is none
                self._finished.update(written)

    def _mark_beyond(self, func, args, kwargs, result) -> None:
        """Everything new; what existed before only where it is overwritten (a gradient buffer is, a view's base is not)."""
        read = () if rules.rewrites_values(func) else _storages(args, kwargs)
        self._beyond.update(storage for storage in _storages(result) if storage not in read)

    def _launched(self, kernel: str) -> None:
        if kernel in launches.MOVING:
            return
        if registry.current_op() is None and not _in_backward() and not registry.is_beyond_logprob():
            self._add(f"triton.{kernel}", "kernel", "")

    def _unexplained(self, kernel: str, count: int) -> None:
        """The profile knows neither case nor call site."""
        self.strays[Stray(self._case(), None, f"kernel.{kernel}", "kernel", "", "", 0, "")] += count

    def _add(self, op: str, kind: str, dtypes: str) -> None:
        self.strays[Stray(self._current_case(), registry.current_layer(), op, kind, dtypes, *_call_site())] += 1

    def _current_case(self) -> str:
        return registry.current_case() or self._case()


def _without_holes(result):
    """Empty tensors for the undefined ones of a list (FlashAttention 3's sums of splits): torch takes no None back from a mode."""
    return [torch.empty(0) if x is None else x for x in result] if isinstance(result, list) else result


def _in_backward() -> bool:
    """Whether autograd is running, other than to recompute activations."""
    return torch._C._current_graph_task_id() != -1 and registry.current_case() != "trainer_recompute"


def _storages(*trees) -> list[StorageWeakRef]:
    """Of the floating-point tensors; a weak reference keeps the identity of a storage from being reused, not its memory."""
    found = []
    for x in filter(rules.is_float, rules.tensors(*trees)):
        with contextlib.suppress(NotImplementedError):  # a layout without storage
            found.append(StorageWeakRef(x.untyped_storage()))
    return found


def _dtypes(args, kwargs, result) -> str:
    def names(*trees) -> str:
        found = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in rules.tensors(*trees))
        return ", ".join(found) or "-"

    return f"{names(args, kwargs)} -> {names(result)}"


def _call_site() -> tuple[str, int, str]:
    """(file, line, function) of the innermost frame outside torch, Triton and the audit; a tensor subclass intercepting is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith((_OWN, _TORCH, launches.TRITON)) or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return _short(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name


def _short(file: str) -> str:
    """The path below the folder from which it was imported, or below the working directory."""
    folders = [os.path.join(os.path.abspath(folder), "") for folder in (*sys.path, os.getcwd())]
    return file[len(max((folder for folder in folders if file.startswith(folder)), key=len, default="")) :]
