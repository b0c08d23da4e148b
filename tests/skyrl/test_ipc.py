"""Weights in one buffer: what is unpacked has the bits of what was packed, whatever the dtypes. Handles need a GPU."""

import json

import pytest
import torch

from isoexec.runtimes.skyrl import ipc

TENSORS = {
    "a": torch.randn(3, 5).bfloat16(),
    "b": torch.randn(7),
    "c": torch.tensor(2.5),
    "d": torch.arange(9).reshape(3, 3).t(),
    "e": torch.tensor([float("nan"), -0.0, float("inf")]),
}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(("limit", "buffers"), [(1 << 20, 1), (64, 4), (1, 5)])
def test_what_is_unpacked_has_the_bits_of_what_was_packed(limit, buffers):
    packed = list(ipc.pack(TENSORS.items(), limit, torch.device("cpu")))
    assert len(packed) == buffers
    found = {}
    for entries, buffer in packed:
        assert all(entry.start % 16 == 0 for entry in entries)
        found |= dict(ipc.unpack(json.loads(json.dumps(entries)), buffer))
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape, bits(found[name])) == (tensor.dtype, tensor.shape, bits(tensor))


def test_one_changed_byte_of_a_buffer_is_one_changed_tensor():
    ((entries, buffer),) = ipc.pack(TENSORS.items(), 1 << 20, torch.device("cpu"))
    buffer[entries[1].start] ^= 1
    changed = [name for name, tensor in ipc.unpack(entries, buffer) if bits(tensor) != bits(TENSORS[name])]
    assert changed == ["b"]
