"""The case that the current scheduler step executes.

A step packs prefill chunks and single decode tokens into one forward pass, and one op call serves both. The step counts as
``engine_prefill`` when any sequence of it brings more than one token, else as ``engine_decode``. Logits and sampling of a step run after
its forward pass in the same thread, so they read the case that the forward pass set.
"""

from __future__ import annotations

import contextvars

from isoexec.ops._core import registry

_case: contextvars.ContextVar[str] = contextvars.ContextVar("isoexec_engine_step", default="engine_prefill")


def begin(max_query_len: int | None) -> str:
    """Start a forward pass whose longest query has ``max_query_len`` tokens (None: a profiling run) and return its case."""
    case = "engine_decode" if max_query_len == 1 else "engine_prefill"
    _case.set(case)
    return case


def current() -> str:
    """Case of the step whose forward pass began last."""
    return _case.get()


def executing():
    """Context that attributes ops to the current step's case."""
    return registry.executing(_case.get())
