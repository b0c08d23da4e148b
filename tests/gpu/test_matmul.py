"""Matrix products: the Triton form everywhere, DeepGEMM on the hardware it is for."""

import os

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops._core.rowsum import tree_sum
from isoexec.ops.matmul import deep_gemm, gpu, hopper
from isoexec.ops.matmul import triton as portable

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
SHAPE = (80, 72, 256) if INTERPRET else (1000, 2048, 4096)  # M, N, K


@pytest.fixture
def operands(random):
    M, N, K = SHAPE
    return random(M, K), random(N, K, scale=1.0 if INTERPRET else K**-0.5)


@pytest.fixture
def exact(operands):
    """Under the interpreter whole numbers, whose sums are exact: numpy's order of additions follows a row's place in its tile."""
    return [(x * 4).round() if INTERPRET else x for x in operands]


def _triton(x, weight, dtype, bias=None, leaves=1):
    # The interpreter multiplies tiles by numpy, whose order follows the tile's shape; on a GPU the shape moves no bit (test_tiles_move_no_bit).
    return portable.product(x, weight, dtype, bias, leaves, portable.SMALL if INTERPRET else None)


def products():
    forms = [pytest.param(_triton, id="triton")]
    if not INTERPRET and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        forms.append(pytest.param(deep_gemm.product, id="deep_gemm"))
    return pytest.mark.parametrize("product", forms)


@products()
def test_within_the_error_of_one_rounding(operands, product):
    x, w = operands
    want = x.double() @ w.double().T
    error = (product(x, w, torch.float32) - want).abs().max()
    assert error <= 3e-5, error
    rounded = product(x, w, torch.bfloat16)
    assert ((rounded - want).abs() <= want.abs() * 2.0**-8 + 3e-5).all()
    assert_bit_equal(product(x, w, torch.float32).bfloat16(), rounded, "the fp32 form, rounded")


@products()
def test_a_row_does_not_depend_on_its_batch(exact, product):
    x, w = exact
    whole = product(x, w, torch.float32)
    for rows in (slice(0, 1), slice(5, 8), slice(17, 80), slice(64, 65), slice(0, 300)):
        assert_bit_equal(product(x[rows], w, torch.float32), whole[rows], f"rows {rows}")
    assert not bit_equal(product(nudge(x, 3, 16), w, torch.float32)[:1], whole[:1])


@products()
def test_a_column_depends_on_its_weight_row_alone(exact, product):
    x, w = exact
    whole = product(x, w, torch.float32)
    assert_bit_equal(product(x, w[16:48].contiguous(), torch.float32), whole[:, 16:48].contiguous(), "a shard of columns")
    odd = torch.empty(x.shape[0], x.shape[1] + 64, dtype=x.dtype, device=x.device)[:, 64:].copy_(x)
    assert_bit_equal(product(odd, w, torch.float32), whole, "strided rows")


@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
def test_leaves_are_added_by_the_tree(operands, leaves):
    x, w = operands
    k = x.shape[1] // leaves
    parts = torch.stack([_triton(x[:, g * k : (g + 1) * k], w[:, g * k : (g + 1) * k], torch.float32) for g in range(leaves)])
    want = tree_sum(parts)
    assert_bit_equal(_triton(x, w, torch.float32, leaves=leaves), want, "in registers")
    assert_bit_equal(portable.tree(parts, torch.float32), want, "over partials")
    assert_bit_equal(portable.partials(x, w, leaves, portable.SMALL if INTERPRET else None), parts, "one program per leaf")
    few = portable.partials(x[:40], w, leaves, portable.SMALL if INTERPRET else None)
    assert_bit_equal(portable.tree(few, torch.float32), want[:40], "few rows")
    if not INTERPRET:
        for rows in (1, 16, 63, 64, 65, 100, 127, 128, 129, 200):
            assert_bit_equal(portable.product(x[:rows], w, torch.float32, leaves=leaves), want[:rows], f"{rows} rows")
            strided = torch.cat((x[:rows], x[:rows, :8]), 1)[:, :-8]  # rows an odd multiple of 16 bytes apart
            assert_bit_equal(portable.product(strided, w, torch.float32, leaves=leaves), want[:rows], f"{rows} rows of a wider matrix")
    assert_bit_equal(portable.product(x[:600], w, torch.float32, leaves=leaves, tiles=portable.SMALL if INTERPRET else None), want[:600], "some rows")
    bias = w[:, 0].contiguous()
    assert_bit_equal(portable.tree(parts, torch.bfloat16, bias), (want + bias.float()).bfloat16(), "bias before the rounding")
    assert_bit_equal(_triton(x, w, torch.bfloat16, bias, leaves), (want + bias.float()).bfloat16(), "bias before the rounding")
    if leaves > 2:
        chain = parts[0]
        for part in parts[1:]:
            chain = chain + part
        assert not bit_equal(chain, want), "the order of the tree must show"


@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_a_half_of_the_tree_may_wait_in_memory(exact, leaves):
    x, w = exact
    want = portable.product(x, w, torch.float32, leaves=leaves, tiles=portable.SMALL)
    assert_bit_equal(portable.product(x, w, torch.float32, leaves=leaves, tiles=portable.TREE[leaves]), want)
    assert not bit_equal(portable.product(nudge(x, 3, 16), w, torch.float32, leaves=leaves, tiles=portable.TREE[leaves]), want)


@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_two_warpgroups_have_the_bits_of_one_program(random, hardware, leaves):
    """The form of hopper.py, all tiles, whole and in 2, 4 and 8 subtrees, ragged edges included (columns of one warpgroup, of the other and of
    none), before rounding and rounded (at widths of 1,156 and 2,070 the copy engine stores fp32 only, or nothing)."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a form for sm_90")
    shapes = (1000, 2048, 4096), (300, 136, 1024), (400, 1024, 2048), (129, 2048, 6144), (512, 2048, 4096), (2000, 1156, 1024), (8192, 2048, 4096)
    shapes += (300, 2072, 1024), (720, 2072, 1024), (720, 2070, 2048), (250, 2070, 1024), (150, 1280, 1024), (1300, 136, 1024)
    taken = {hopper.form(M, N, leaves, hopper._processors(hardware))[::2] for M, N, _ in shapes}
    assert {tile for tile, _ in taken} == set(hopper.TILES) and {parts for _, parts in taken} == {1, 2, 4, 8} - {p for p in (4, 8) if p > leaves}
    for M, N, K in shapes:
        x, w = random(M, K), random(N, K, scale=K**-0.5)
        want = portable.product(x, w, torch.float32, leaves=leaves, tiles=portable.SMALL)
        assert_bit_equal(hopper.product(x, w, torch.float32, None, leaves), want, f"{M}x{N}x{K}")
        bias = w[:, 0].contiguous()
        assert_bit_equal(hopper.product(x, w, torch.bfloat16, bias, leaves), (want + bias.float()).bfloat16(), f"{M}x{N}x{K}, rounded, bias")
        assert_bit_equal(gpu.tree_product(x[:5], w, torch.float32, None, leaves), want[:5], "few rows, by the public op's route")
        assert_bit_equal(gpu.tree_product(x, w, torch.float32, None, leaves), want, "many rows, by the public op's route")
        assert not bit_equal(hopper.product(nudge(x, 3, 16), w, torch.float32, None, leaves), want)
    odd = torch.empty(300, 1024 + 8, dtype=x.dtype, device=hardware)[:, 3 : 3 + 1024].copy_(random(300, 1024))
    w = random(136, 1024)
    packed = hopper.product(odd.contiguous(), w, torch.float32, None, leaves)
    assert_bit_equal(hopper.product(odd, w, torch.float32, None, leaves), packed, "a view")


@pytest.mark.parametrize("N", [1, 3, 8, 60, 64])
def test_narrow_weights(random, hardware, N):
    """A shared expert's gate has one column, a small model's projections few."""
    x, w = random(700, 512), random(N, 512, scale=512**-0.5)
    for dtype in (torch.bfloat16, torch.float32):
        y = gpu.product(x, w, dtype)
        assert (y - x.double() @ w.double().T).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 1e-5)
        assert_bit_equal(gpu.product(x[7:9], w, dtype), y[7:9], "rows alone")


def test_tiles_move_no_bit(operands, hardware):
    x, w = operands
    want = portable.product(x, w, torch.float32)
    every = (64, 64, 64, 4, 4), (64, 128, 64, 4, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (64, 64, 32, 4, 4), (128, 64, 16, 8, 3), (256, 128, 64, 8, 3)
    for tiles in (*every, (64, 32, 128, 4, 6)):
        assert_bit_equal(portable.product(x, w, torch.float32, tiles=tiles), want, str(tiles))


def test_public_ops(operands, hardware):
    from isoexec.ops import matmul

    x, w = operands
    y = matmul.linear(x.view(-1, 10, x.shape[1]), w)
    assert_bit_equal(matmul.linear(x[7:8], w), y.flatten(0, 1)[7:8], "linear")
    assert_bit_equal(matmul.lm_head(x, w).bfloat16(), y.flatten(0, 1), "lm_head is linear before the rounding")
    whole = matmul.row_parallel_linear(x, w, leaves=8)
    assert_bit_equal(matmul.row_parallel_linear(x[3:9], w, leaves=8), whole[3:9], "row-parallel")
    half = x.shape[1] // 2
    parts = [portable.product(x[:, s], w[:, s], torch.float32, None, 4) for s in (slice(0, half), slice(half, None))]
    assert_bit_equal((parts[0] + parts[1]).bfloat16(), whole, "two ranks own half of the tree each")
    with pytest.raises(ContractError, match="leaves"):
        matmul.row_parallel_linear(x, w, leaves=3)


def test_gradients(random, hardware):
    from isoexec.ops import matmul

    row_parallel = lambda a, b: matmul.row_parallel_linear(a, b, leaves=4)  # noqa: E731
    linear, lm_head = matmul.linear, matmul.lm_head
    for op, M, N in ((linear, 300, 256), (linear, 1, 256), (linear, 77, 60), (lm_head, 301, 256), (row_parallel, 300, 256)):
        x, w = random(M, 512).requires_grad_(), random(N, 512).requires_grad_()
        y = op(x, w)
        grad = random(M, N, dtype=y.dtype)
        got = torch.autograd.grad(y, (x, w), grad)
        want = grad.double() @ w.detach().double(), grad.double().T @ x.detach().double()
        for g, d, again in zip(got, want, torch.autograd.grad(op(x, w), (x, w), grad)):
            assert (g - d).norm() <= 5e-3 * d.norm()
            assert_bit_equal(g, again, "gradient of a second run")


def test_a_provider_that_is_missing_or_differs_is_refused(tmp_path):
    from isoexec.ops._core.provider import PROVIDERS, check

    with pytest.raises(ContractError, match="not installed"):
        check(PROVIDERS["deep_gemm"], tmp_path / "nothing")
    (tmp_path / "_C.so").write_bytes(b"another binary")
    with pytest.raises(ContractError, match="expected sha256"):
        check(PROVIDERS["deep_gemm"], tmp_path)
