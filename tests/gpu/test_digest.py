"""Digest kernels: the numbers of the torch forms, wherever they run."""

import pytest
import torch

from isoexec.ops._core import digest, triton_digest
from isoexec.ops._core.bits import nudge
from isoexec.ops._trace import digest as rows

DTYPES = (torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.int64)


def patterns(shape, dtype, device):
    """Every bit pattern is as likely as any other, negative ones among them."""
    size = torch.empty((), dtype=dtype).element_size()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    low, high = torch.iinfo(integers).min, torch.iinfo(integers).max
    drawn = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(3), dtype=integers)
    return drawn.view(dtype).to(device)


def row_digests(x):
    return triton_digest.row_sums(rows._pieces(x), rows._length(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (2, 9001), (2, 40_000), (0, 8), (513, 24), (515, 9)])
def test_rows(device, dtype, shape):
    x = patterns(shape, dtype, device)
    got, want = row_digests(x), rows.row_digests(x.cpu())
    assert torch.equal(got.cpu(), want)
    if x.numel():
        x.view(torch.uint8)[-1, -1] ^= 1
        assert not torch.equal(row_digests(x)[-1].cpu(), want[-1]) and torch.equal(row_digests(x)[:-1].cpu(), want[:-1])


def test_several_tensors_in_one_launch(device):
    """Ten of one number of rows, one of which is cut out of wider rows, one too wide, and some that loads of 16 bytes do not fit."""
    wide = patterns((5, 3, 64), torch.bfloat16, device)
    tensors = [wide, wide[:, 1:], wide[:, 1]] + [patterns((5, n), torch.bfloat16, device) for n in (16, 48, 7, 2080, 33_000, 32)]
    tensors.append(patterns((5, 32), torch.float32, device))
    out = [torch.full((5,), 7, dtype=torch.int64, device=device) for _ in tensors]
    triton_digest.several_row_sums([(rows._pieces(x), rows._length(x), o) for x, o in zip(tensors, out)])
    for x, found in zip(tensors, out):
        assert torch.equal(found.cpu(), rows.row_digests(x.cpu().contiguous())), tuple(x.shape)


def test_rows_of_a_part_of_each_row_in_place(device):
    whole = patterns((6, 96), torch.bfloat16, device).view(6, 3, 32)
    out = torch.full((6,), 7, dtype=torch.int64, device=device)
    part = whole[:, 1:]
    assert rows._pieces(part).data_ptr() == part.data_ptr(), "a copy is a pass over the bytes"
    assert triton_digest.row_sums(rows._pieces(part), rows._length(part), out) is out
    assert torch.equal(out.cpu(), rows.row_digests(part.cpu().contiguous()))


@pytest.mark.parametrize("dtype", (torch.int8, torch.bfloat16, torch.float32))
def test_columns_whatever_their_order(device, dtype):
    x = patterns((4, 1500), dtype, device)
    bits = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(4)).to(device)
    want = rows.column_digests(x.cpu())
    for columns in (bits, bits[:, order].contiguous()):
        assert torch.equal(triton_digest.column_sums(columns).cpu(), want)
    bits[2, 8] ^= 1
    assert (triton_digest.column_sums(bits).cpu() != want).tolist() == [False, False, True, False]


@pytest.mark.parametrize("dtype", (*DTYPES, torch.bool))
@pytest.mark.parametrize("offsets,shape", [((0, 0), (37, 130)), ((5, 0), (20, 130)), ((0, 65), (37, 65)), ((9, 13), (1, 1))])
def test_parts_of_a_weight(device, dtype, offsets, shape):
    whole = patterns((37, 130), dtype, device) if dtype != torch.bool else patterns((37, 130), torch.int8, device) > 0
    part = whole[offsets[0] : offsets[0] + shape[0], offsets[1] : offsets[1] + shape[1]]
    want = digest._sum(part.cpu(), [130, 1], offsets[0] * 130 + offsets[1])
    integers = part.to(torch.uint8) if dtype == torch.bool else part
    halves = 2 if integers.element_size() == 8 else 1
    bits = integers.contiguous().view(-1).view(digest._INTEGERS[integers.element_size() // halves])

    def kernel():
        return triton_digest.part_sum(bits, shape[1] * halves, 130 * halves, (offsets[0] * 130 + offsets[1]) * halves)

    assert kernel().item() == want.item()
    bits[-1] ^= 1
    assert kernel().item() != want.item()


def test_whole_tensors_in_one_launch(device, monkeypatch):
    """Of every width, aligned and not, longer and shorter than a block, and longer than a segment."""
    monkeypatch.setattr(triton_digest, "_SEGMENT", 2048)
    tensors = [patterns(shape, dtype, device) for dtype in DTYPES for shape in ((3, 7), (2, 1024))]
    tensors += [patterns((4099,), torch.bfloat16, device), patterns((50,), torch.int8, device) > 0]
    tensors.append(tensors[-2][1:])
    want = [digest._sum(x.cpu(), digest._strides(tuple(x.shape)), 0).item() for x in tensors]
    assert triton_digest.whole_sums(tensors).tolist() == want
    for changed in (5, 10):  # their last elements: in a whole block, and behind the last one, which a view of it has too
        tensors[changed].view(-1)[-1:].view(torch.uint8)[-1] ^= 1
    found = triton_digest.whole_sums(tensors).tolist()
    assert [i for i, total in enumerate(want) if found[i] != total] == [5, 10, 12]


def test_on_the_device_as_on_the_cpu(hardware):
    """The forms that the manifest and the recorder call, which choose the kernels by the device."""
    for shape in ((70_001,), (129, 513), (3, 40, 8)):
        weight = patterns(shape, torch.bfloat16, hardware)
        assert digest.tensor_digest(weight) == digest.tensor_digest(weight.cpu())
        assert torch.equal(rows.row_digests(weight.view(shape[0], -1)).cpu(), rows.row_digests(weight.cpu().view(shape[0], -1)))
    many = {f"{n}": patterns(shape, torch.bfloat16, hardware) for n, shape in enumerate([(70_001,), (129, 513), (0, 4), (300, 1001)])}
    many["apart"] = many["3"].t()
    assert digest.tensors_digest(many) == digest.tensors_digest({name: tensor.cpu() for name, tensor in many.items()})
    shard = weight[:, :, 2:6]
    assert digest.tensor_digest(shard, (3, 40, 8), (0, 0, 2)) == digest.tensor_digest(shard.cpu(), (3, 40, 8), (0, 0, 2))


def test_inside_a_cuda_graph(hardware):
    x = torch.randn(64, 2048, device=hardware, dtype=torch.bfloat16)
    rows.row_digests(x * 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        found = rows.row_digests(y)
    for seed in (1, 2):
        x.copy_(torch.randn(64, 2048, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(found.cpu(), rows.row_digests((x * 2).cpu()))
    before = found.clone()
    x.copy_(nudge(x, 3))
    graph.replay()
    assert not torch.equal(found, before)
