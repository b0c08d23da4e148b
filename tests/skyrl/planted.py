"""Faults in the processes of a run, which no setting of the product makes."""

from __future__ import annotations

import os
from pathlib import Path

_HOOK = '''
import importlib.abc, importlib.util, sys

PLANTS = {plants!r}


class Finder(importlib.abc.MetaPathFinder):
    """Runs a plant in the namespace of its module, once that is loaded."""

    def find_spec(self, name, path=None, target=None):
        code = PLANTS.pop(name, None)
        if code is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def planted(module):
            load(module)
            exec(code, module.__dict__)

        spec.loader.exec_module = planted
        return spec


sys.meta_path.insert(0, Finder())
'''


def planted(folder: Path, plants: dict[str, str]) -> dict[str, str]:
    """Environment of a run in each process of which Python, at its start, finds plants for some modules.

    Args:
        folder: exists; Python imports ``sitecustomize`` from it.
        plants: name of a module -> code that is run in its namespace right after it.
    """
    (folder / "sitecustomize.py").write_text(_HOOK.format(plants=plants))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
