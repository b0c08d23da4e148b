"""Declaration and dispatch of ops.

A public op is a function with a signature, a docstring and no body. The :func:`op` decorator gives it one: it picks the
implementation for the device of the op's first tensor, counts what served which case, and marks the calling thread as
"inside an op", which is how the audit tells the library's arithmetic from stray arithmetic. An observer (:func:`observing`) is shown
arguments and results of every op that no other op calls; without one nothing is done for it but a test.

No implementation for a device is an error. There is no fallback.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from isoexec.contract import CASES, ContractError

#: What an observer calls the places before a model's first layer and after its last one; layers count from 0.
EMBEDDING, HEAD = -1, 1 << 20

_case: contextvars.ContextVar[str | None] = contextvars.ContextVar("isoexec_case", default=None)
_layer: contextvars.ContextVar[int | None] = contextvars.ContextVar("isoexec_layer", default=None)
_inside: contextvars.ContextVar[str | None] = contextvars.ContextVar("isoexec_op", default=None)
_beyond: contextvars.ContextVar[bool] = contextvars.ContextVar("isoexec_beyond_logprob", default=False)
_before_rounding: contextvars.ContextVar[bool] = contextvars.ContextVar("isoexec_before_rounding", default=False)
_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("isoexec_observer", default=None)
_served: Counter[tuple[str, str | None, str]] = Counter()
_declared: dict[str, OpDeclaration] = {}


@dataclass(frozen=True)
class OpDeclaration:
    """What is known about an op without running it.

    Attributes:
        name: ``"<family>.<op>"``, e.g. ``"matmul.linear"``.
        implementations: device type to ``"module:function"``.
        hazards: numeric traps that the op's tests cover, one sentence each.
        parameters: names of the op's arguments, in order.
        defaults: values of those that need not be given.
    """

    name: str
    implementations: dict[str, str]
    hazards: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict, hash=False)

    def resolve(self, device: str):
        """Import and return the implementation for ``device`` (``"cpu"``, ``"cuda"``).

        Raises:
            ContractError: the op has no implementation for that device.
        """
        try:
            target = self.implementations[device]
        except KeyError:
            raise ContractError(
                f"op {self.name}: no implementation for device {device!r}; it has {sorted(self.implementations)}"
            ) from None
        module, _, function = target.partition(":")
        return getattr(importlib.import_module(module), function)


class Observer(Protocol):
    """Sees every op that a thread runs, from the outside; it must not change what it is shown."""

    def before(self, declaration: OpDeclaration, args: tuple, kwargs: dict) -> object:
        """Called before the op runs, which may write to its arguments; what it returns is handed to :meth:`after`."""

    def after(self, seen: object, result) -> None:
        """Called with the op's result."""


def op(name: str, *, hazards: tuple[str, ...] = (), check: Callable | None = None, **implementations: str):
    """Declare a public op; ``implementations`` maps device types to ``"module:function"``.

    ``module`` is relative to the declaring package when it starts with a dot: ``cpu=".reference:linear"``. ``check`` is called with the op's
    arguments before any implementation is, and raises ContractError for what none of them takes; it reads attributes alone.
    """

    def decorate(signature):
        package = signature.__module__
        targets = {d: package + t if t.startswith(".") else t for d, t in implementations.items()}
        parameters = inspect.signature(signature).parameters
        defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
        declaration = OpDeclaration(name, targets, hazards, tuple(parameters), defaults)
        if name in _declared:
            raise ValueError(f"op {name} is declared twice")
        _declared[name] = declaration
        resolved = functools.lru_cache(maxsize=None)(declaration.resolve)

        @functools.wraps(signature)
        def dispatch(*args, **kwargs):
            device = _device_of(name, args, kwargs)
            implementation = resolved(device)
            if check is not None:
                check(*args, **kwargs)
            _served[name, _case.get(), declaration.implementations.get(device, device)] += 1
            observer = _observer.get()
            if observer is not None and _inside.get() is not None:
                observer = None  # an op's own ops are its matter
            token = _inside.set(name)
            try:
                if observer is None:
                    return implementation(*args, **kwargs)
                seen = observer.before(declaration, args, kwargs)
                result = implementation(*args, **kwargs)
                observer.after(seen, result)
                return result
            finally:
                _inside.reset(token)

        dispatch.declaration = declaration
        return dispatch

    return decorate


def _device_of(name: str, args, kwargs) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type
    raise TypeError(f"op {name}: called without a tensor")


@contextlib.contextmanager
def executing(case: str):
    """Attribute the ops run inside the block to ``case`` (one of :data:`isoexec.contract.CASES`)."""
    if case not in CASES:
        raise ContractError(f"unknown case {case!r}; expected one of {CASES}")
    token = _case.set(case)
    try:
        yield
    finally:
        _case.reset(token)


@contextlib.contextmanager
def in_layer(index: int):
    """Attribute what runs inside the block to decoder layer ``index`` of the whole model, counted from 0."""
    token = _layer.set(index)
    try:
        yield
    finally:
        _layer.reset(token)


@contextlib.contextmanager
def beyond_logprob():
    """What is computed inside the block reaches no logprob: a loss, a statistic. Moves no bit; the audit takes it at its word and reports
    an op on the path that reads such a value."""
    token = _beyond.set(True)
    try:
        yield
    finally:
        _beyond.reset(token)


@contextlib.contextmanager
def on_logprob_path():
    """What is computed inside the block leads to a logprob after all, within :func:`beyond_logprob`."""
    token = _beyond.set(False)
    try:
        yield
    finally:
        _beyond.reset(token)


@contextlib.contextmanager
def before_rounding():
    """Inside, ops whose operands are bf16 take fp32 ones that hold bf16 values, and return what they would round at last: what a comparison
    of bits wants of the CPU backend. Outside, an fp32 operand is refused."""
    token = _before_rounding.set(True)
    try:
        yield
    finally:
        _before_rounding.reset(token)


@contextlib.contextmanager
def observing(observer: Observer):
    """Show the ops that this thread runs inside the block to ``observer``."""
    token = _observer.set(observer)
    try:
        yield observer
    finally:
        _observer.reset(token)


def current_observer() -> Observer | None:
    """The observer of this thread, or None."""
    return _observer.get()


def current_op() -> str | None:
    """Name of the op that this thread is inside of, or None."""
    return _inside.get()


def current_case() -> str | None:
    """Case that this thread executes, or None."""
    return _case.get()


def current_layer() -> int | None:
    """Decoder layer that this thread executes, or None."""
    return _layer.get()


def is_beyond_logprob() -> bool:
    """Whether this thread computes what reaches no logprob."""
    return _beyond.get()


def is_before_rounding() -> bool:
    """Whether this thread wants values before the last rounding."""
    return _before_rounding.get()


def count(calls: Counter[tuple[str, str | None, str]]) -> None:
    """Ops ran again whose Python did not: a graph that was captured with them was replayed."""
    _served.update(calls)


def served() -> dict[tuple[str, str | None, str], int]:
    """Calls so far by (op, case, implementation); any thread may ask."""
    return dict(_served)


def declarations() -> dict[str, OpDeclaration]:
    """Every op declared by the families imported so far."""
    return dict(_declared)
