"""What a checkpoint's files hold, whichever form they are stored in: read by the trainer's reader, without engine code or Megatron."""

from __future__ import annotations

from isoexec.contract.manifest import Manifest
from isoexec.ops._core.digest import tensor_digest
from isoexec.runtimes.megatron.hf_files import HFFiles

_FP32 = ("A_log", "dt_bias")


def in_form_of(folder, weights) -> dict:
    """The language model's tensors of the folder ``weights`` as the checkpoint in ``folder`` would store them, beside its own tower."""
    source = HFFiles(weights)
    return HFFiles(folder).in_stored_form({name: source.tensor(name).contiguous() for name in source.names()})


def manifest_of(folder) -> Manifest:
    """Manifest that a process has to have after it loaded ``folder``."""
    files = HFFiles(folder)
    tensors = {name: files.tensor(name) for name in files.names()}
    return Manifest({name: tensor_digest(t.float() if name.endswith(_FP32) else t) for name, t in tensors.items()})
