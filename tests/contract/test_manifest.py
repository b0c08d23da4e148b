"""Weight manifests: the digest against a definition in plain Python, every layout, and what one bit does."""

import dataclasses
import json

import pytest
import torch

from isoexec.contract import ContractError, ExecutionContract
from isoexec.contract.manifest import Manifest, check_dtypes, check_synced
from isoexec.ops._core import digest
from isoexec.ops._core.bits import nudge
from isoexec.ops._core.digest import tensor_digest, tensors_digest

WORD = (1 << 64) - 1


def defined(tensor):
    """The definition, one element at a time."""
    width = 8 * tensor.element_size()
    total = 0
    for index, bits in enumerate(tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).flatten().tolist()):
        word = ((index << width) + (bits & ((1 << width) - 1)) + 0x9E3779B97F4A7C15) & WORD
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
        total += word ^ (word >> 31)
    return total & WORD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_definition(dtype):
    for shape in ((), (1,), (7,), (5, 3), (2, 3, 4), (0, 4)):
        tensor = torch.randn(shape).to(dtype)
        assert tensor_digest(tensor).total == defined(tensor)


def weight():
    return torch.randn(24, 40).bfloat16()


def test_layouts_give_one_digest(monkeypatch):
    w = weight()
    whole = tensor_digest(w)
    assert tensor_digest(w.t().contiguous().t()) == whole
    for parts in ([(0, 24, 0, 40)], [(r, r + 6, 0, 40) for r in range(0, 24, 6)], [(0, 24, c, c + 8) for c in range(0, 40, 8)],
                  [(12, 24, 20, 40), (0, 12, 0, 20), (12, 24, 0, 20), (0, 12, 20, 40)]):  # fmt: skip
        shards = [{"w": tensor_digest(w[a:b, c:d], w.shape, (a, c))} for a, b, c, d in parts]
        assert Manifest.of_ranks(shards).tensors["w"] == whole
    stacked = torch.cat([weight(), w, weight()])
    assert tensor_digest(stacked[24:48]) == whole
    for chunk in (1, 7, 64):
        monkeypatch.setattr(digest, "_CHUNK", {"cpu": chunk})
        assert tensor_digest(w) == whole


def test_a_bit_a_swap_and_a_place_are_seen():
    w = weight()
    whole = tensor_digest(w)
    moved = w.clone()
    moved[3, 5] = nudge(moved[3, 5])
    swapped = w.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    signed = torch.zeros(4)
    for other in (moved, swapped, w.view(40, 24), w.float()):
        assert tensor_digest(other) != whole
    assert tensor_digest(moved).total != whole.total and tensor_digest(swapped).total != whole.total
    assert tensor_digest(signed) != tensor_digest(-signed)
    assert tensor_digest(w[:6], w.shape, (6, 0)).total != tensor_digest(w[:6], w.shape, (0, 0)).total


def test_every_dtype_of_a_buffer():
    for tensor in (
        torch.arange(5),
        torch.arange(5.0, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.uint8),
    ):
        changed = tensor.clone()
        changed[0] = not changed[0] if tensor.dtype == torch.bool else changed[0] + 1
        assert tensor_digest(tensor) == tensor_digest(tensor.clone()) != tensor_digest(changed)
        assert tensor_digest(tensor[1:], tensor.shape, (1,)) + tensor_digest(tensor[:1], tensor.shape) == tensor_digest(tensor)
    with pytest.raises(ContractError, match="expected real numbers"):
        tensor_digest(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ContractError, match="does not lie within"):
        tensor_digest(torch.zeros(4), (6,), (3,))
    with pytest.raises(ContractError, match="too many elements"):
        tensor_digest(torch.zeros(1, 1), (1 << 17, 1 << 16))


def manifest(**changes):
    tensors = {"layers.0.w": torch.ones(4, 4).bfloat16(), "layers.0.A_log": torch.ones(4), "norm": torch.ones(4).bfloat16(), **changes}
    return Manifest(tensors_digest({name: tensor for name, tensor in tensors.items() if tensor is not None}))


def test_a_manifest_round_trips_and_names_what_is_missing():
    m = manifest()
    again = Manifest.from_data(json.dumps(m.data()))
    assert again.tensors == m.tensors and again.sha256 == m.sha256
    part = {"w": tensor_digest(torch.ones(2, 4), (4, 4))}
    with pytest.raises(ContractError, match=r"weights.w: digested 8 of 16 elements"):
        Manifest.of_ranks([part])
    with pytest.raises(ContractError, match=r"weights.w: digested 24 of 16"):
        Manifest.of_ranks([part, part, part])
    with pytest.raises(ContractError, match="parts of different tensors"):
        Manifest.of_ranks([part, {"w": tensor_digest(torch.ones(2, 4).bfloat16(), (4, 4))}])


def test_a_stale_engine_is_refused():
    check_synced(manifest(), manifest())
    one_ulp = torch.ones(4).bfloat16()
    one_ulp[2] = nudge(one_ulp[2])
    with pytest.raises(
        ContractError, match=r"weights.norm: trainer has bfloat16\[4\] 0x[0-9a-f]{16}, engine has .*; 1 of 3 tensors differ: sync again"
    ):
        check_synced(manifest(), manifest(norm=one_ulp))
    with pytest.raises(ContractError, match="weights.norm: .*engine has no such tensor"):
        check_synced(manifest(), manifest(norm=None))


def test_a_silent_cast_is_refused():
    hybrid = ExecutionContract("Qwen3_5ForCausalLM", "cpu")
    check_dtypes(hybrid, manifest())
    with pytest.raises(ContractError, match="weights.layers.0.A_log: dtype: the contract says float32, found bfloat16"):
        check_dtypes(hybrid, manifest(**{"layers.0.A_log": torch.ones(4).bfloat16()}))
    with pytest.raises(ContractError, match="weights.norm: dtype: the contract says bfloat16, found float32"):
        check_dtypes(dataclasses.replace(hybrid), manifest(norm=torch.ones(4)))
