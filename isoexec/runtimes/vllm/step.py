"""The case that the current scheduler step executes.

A step packs prefill chunks and single decode tokens into one forward pass, and one op call serves both. The step counts as
``engine_prefill`` when any sequence of it brings more than one token, else as ``engine_decode``. Logits and sampling of a step run after
its forward pass in the same thread, so they read the case that the forward pass set.

An observer of the ops is told here which tokens a step's rows are, where the engine said how to know (:func:`observed`).
"""

from __future__ import annotations

import contextlib
import contextvars

from isoexec.ops._core import registry

_case: contextvars.ContextVar[str] = contextvars.ContextVar("isoexec_engine_step", default="engine_prefill")
_rows: contextvars.ContextVar = contextvars.ContextVar("isoexec_engine_rows", default=None)


def begin(max_query_len: int | None) -> str:
    """Start a forward pass whose longest query has ``max_query_len`` tokens (None: a profiling run) and return its case."""
    case = "engine_decode" if max_query_len == 1 else "engine_prefill"
    _case.set(case)
    observer, rows = registry.current_observer(), _rows.get()
    if observer is not None and rows is not None:
        observer.begin(*rows.tokens())
    return case


def begin_replay() -> tuple | None:
    """A captured forward pass of single tokens was replayed; the rows that it held, where an observer wants to know."""
    _case.set("engine_decode")
    rows = _rows.get()
    return None if registry.current_observer() is None or rows is None else rows.tokens()


def current() -> str:
    """Case of the step whose forward pass began last."""
    return _case.get()


def begin_head() -> None:
    """The logits of the step's last rows are about to be computed."""
    observer, rows = registry.current_observer(), _rows.get()
    if observer is not None and rows is not None and (sampled := rows.sampled()) is not None:
        observer.select(*sampled)


def end() -> None:
    """The step has sampled."""
    observer, rows = registry.current_observer(), _rows.get()
    if observer is not None and rows is not None:
        rows.done()
        observer.idle()


@contextlib.contextmanager
def observed(rows):
    """Steps inside the block take their rows from ``rows``, a :class:`isoexec.runtimes.vllm.step_rows.StepRows`."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def executing():
    """Context that attributes ops to the current step's case."""
    return registry.executing(_case.get())
