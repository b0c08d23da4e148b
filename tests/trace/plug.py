"""Where the tests plant faults: switches in front of op implementations, and undoable changes of the running models.

Lives in the workers of the tests alone. A switch is put on an implementation before the registry has resolved it; it passes every call
on until a fault is planted.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack

from isoexec.ops._core import registry
from isoexec.runtimes import evidence

_replaced = {}  # op -> function(original, *args, **kwargs)


def install(ops) -> None:
    """Put a switch in front of the CPU implementation of each of ``ops``."""
    known = evidence.declarations()
    for op in ops:
        module, _, function = known[op].implementations["cpu"].partition(":")
        module = importlib.import_module(module)
        original = getattr(module, function)
        setattr(module, function, _switch(op, original))


def _switch(op, original):
    def run(*args, **kwargs):
        replaced = _replaced.get(op)
        return original(*args, **kwargs) if replaced is None else replaced(original, *args, **kwargs)

    return run


class Plant(ExitStack):
    """What is planted, undone in reverse order on closing."""

    def op(self, name: str, function, *, layer: int | None = None) -> None:
        """``function(original, *args, **kwargs)`` serves op ``name``, in one layer or everywhere; not what other ops use of its code."""

        def only_there(original, *args, **kwargs):
            if registry.current_op() == name and layer in (None, registry.current_layer()):
                return function(original, *args, **kwargs)
            return original(*args, **kwargs)

        _replaced[name] = only_there
        self.callback(_replaced.pop, name)

    def values(self, tensor, change) -> None:
        """``change`` writes to ``tensor``; its values come back on closing."""
        data = tensor.data
        before = data.clone()
        self.callback(lambda: data.copy_(before))
        change(data)

    def attribute(self, owner, name: str, value) -> None:
        """Set an attribute; what was there comes back."""
        had = name in vars(owner)
        before = getattr(owner, name)
        if hasattr(owner, "_modules") and name in owner._modules:  # a module's submodule
            before, had = owner._modules[name], True
        setattr(owner, name, value)
        self.callback(lambda: setattr(owner, name, before) if had else delattr(owner, name))

    def hook(self, handle) -> None:
        """Remove a torch hook on closing."""
        self.callback(handle.remove)
