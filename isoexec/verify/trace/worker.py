"""The recording side of a trace, in the process of a runtime."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable
from pathlib import Path

from isoexec.contract import active_contract
from isoexec.contract.manifest import Manifest
from isoexec.ops._core import registry
from isoexec.ops._trace.recorder import Recorder, Wanted
from isoexec.verify.trace import bundle


@contextlib.contextmanager
def recording(trace: dict | None, name: str, manifest: Callable[[], Manifest]):
    """Record the ops that run inside the block.

    Args:
        trace: ``file`` to write, and optionally ``level``, ``sequences``, ``numbers`` and ``wanted`` of
            :class:`isoexec.ops._trace.recorder.Recorder`; None records nothing.
        name: of the side.
        manifest: of the weights that the runtime holds; asked in a first pass, which keeps no rows.
    """
    if trace is None:
        yield
        return
    wanted = [Wanted(*w) for w in trace.get("wanted", ())]
    recorder = Recorder(trace.get("level", "state"), trace.get("sequences"), wanted, trace.get("numbers"))
    with registry.observing(recorder):
        yield
    contract = active_contract()
    process = environment(contract, name)
    if contract is not None and not wanted:
        process["weights"] = manifest().data()
    side = name, recorder.finish(), None if contract is None else contract.data(), process
    bundle.write(Path(trace["file"]), {}, [side], {})


def environment(contract, name: str) -> dict:
    """What this process is: the identity that a handshake compares, without what the contract says itself."""
    if contract is None:
        return {"python": platform.python_version()}
    from isoexec.runtimes import evidence

    found = evidence.identity(contract, name)
    policy = {key: value for key, value in found.numerical_policy.items() if key != "contract"}
    return {"digests": found.digests, "deployment": found.deployment, **policy}
