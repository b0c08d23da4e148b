"""Kernels compiled for sm_90 without a GPU: what the compiler may not do to their arithmetic, read off the PTX."""

import os
import re

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from isoexec.ops._core import triton_digest
from isoexec.ops._core.triton_math import COMPILE
from isoexec.ops.activation import triton as activation
from isoexec.ops.attention import triton as attention
from isoexec.ops.logprob import triton as logprob
from isoexec.ops.matmul import triton as matmul
from isoexec.ops.moe import triton_combine, triton_grouped, triton_route
from isoexec.ops.norm import triton as norm
from isoexec.ops.rope import triton as rope
from tests.gpu.offline import ptx_and_resources

_TYPES = {
    "eps": "fp32", "r_out": "*fp32", "cos": "*fp32", "sin": "*fp32", "cos_out": "*fp32", "sin_out": "*fp32", "positions": "*i64",
    "frequencies": "*fp32", "logits": "*fp32", "maximum": "*fp32", "maxima": "*fp32", "totals": "*fp32", "sums": "*fp32", "target": "*fp32", "tokens": "*i64", "maximum_out": "*fp32",
    "out": "*fp32", "temperature": "*fp32", "lse": "*fp32", "partials": "*fp32", "parked": "*fp32", "scale": "fp32", "cu_seqlens": "*i32", "seq_lens": "*i32",
    "block_table": "*i32", "experts": "*i64", "weights": "*fp32", "pair": "*i32",
}  # fmt: skip
_BF16 = {"h", "saved", "shared", "x", "y", "residual", "gate", "weight", "total", "gate_up", "q", "keys", "values", "w", "bias"}
_ALIGNED = {"size", "x_outer", "gate_outer", "outer", "x_stride", "w_stride", "q_token", "q_head", "k_page", "k_token", "k_head", "x_stride", "D", "F", "v_page", "v_token", "v_head"}


def ptx(kernel, warps=4, stages=3, architecture=90, **constants):
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if isinstance(constants.get(name), str):
            signature[name] = constants.pop(name)
            continue
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = _TYPES.get(name, "*bf16" if name in _BF16 else "i32")
        if signature[name].startswith("*") or name in _ALIGNED:
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps, "num_stages": stages, **COMPILE}).asm["ptx"]


_NORM = dict(D=2048, N=2048, LOGN=11, R=1, SAVE=False)
FORWARD = {
    "rms_norm": (norm.forward_kernel, dict(_NORM, ADD=False, GATED=False, INNER=True, SHIFT=False)),
    "add_zero_centered_rms_norm": (norm.forward_kernel, dict(_NORM, ADD=True, GATED=False, INNER=False, SHIFT=True)),
    "head norm": (norm.forward_kernel, dict(_NORM, D=128, N=128, LOGN=7, R=8, ADD=False, GATED=False, INNER=True, SHIFT=False)),
    "gated_rms_norm": (norm.forward_kernel, dict(_NORM, D=128, N=128, LOGN=7, R=8, ADD=False, GATED=True, INNER=False, SHIFT=False)),
    "rotation": (rope.rotate_kernel, dict(K=128, N=128, HALF=64, R=16, BACK=False)),
    "silu_mul": (activation.silu_mul_kernel, dict(F=6144, R=1, BLOCK=2048)),
    "sigmoid_gate": (activation.sigmoid_gate_kernel, dict(D=128, R=16, BLOCK=128, ONE=False)),
    "temperature": (logprob.scale_kernel, dict(PER_ROW=False, TILE=4096)),
    "block sums": (logprob.sums_kernel, dict(TILES=64, BLOCK=64, LOGB=6, PER_TILE=64)),
    "tree": (matmul.tree_kernel, dict(BIAS=True, LEAVES=8, BLOCK=1024, EARLY=False)),
    "combine": (triton_combine.combine_kernel, dict(TOP=8, P=8, GROUPS=8, PER_GROUP=32, SHARED=True, BLOCK=1024)),
    "route": (triton_route.route_kernel, dict(bias="*fp32", E=256, N=256, LOGN=8, TOP=8, P=8, RENORMALIZE=True, SIGMOID=False, BIAS=False, SCALE=False, GROUPS=1, KEPT=1, M=1)),
    "totals": (logprob.total_kernel, dict(N=4096, LOGN=12, TILES=64, TOKEN=False, GATHER=False)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_arithmetic_is_as_written(name):
    kernel, constants = FORWARD[name]
    text = ptx(kernel, **constants)
    for what in (r"fma\.\S*f32", r"div\.(approx|full)", r"\.ftz", r"\b(atom|red)\."):
        assert not re.search(what, text), f"{name}: {re.search(what, text).group()}"


@pytest.mark.parametrize("aligned", [True, False])
def test_weights_are_digested_in_loads_of_16_bytes_where_they_lie_so(aligned):
    text = ptx(triton_digest._segments_kernel, table="*i64", out="*i64", WIDTH=16, ALIGNED=aligned, SALT=1, BLOCK=1024)
    assert ("ld.global.v4.b32" in text) is aligned and re.search(r"(atom|red)\.\S*add\S*64", text)


def test_contraction_would_be_seen(monkeypatch):
    """Negative control: with fusion allowed the same source has contracted multiply-adds."""
    monkeypatch.setitem(COMPILE, "enable_fp_fusion", True)
    kernel, constants = FORWARD["rms_norm"]
    assert re.search(r"fma\.\S*f32", ptx(kernel, **constants))


def test_wide_rows_load_sixteen_bytes():
    kernel, constants = FORWARD["rms_norm"]
    assert re.search(r"ld\.global\.v4\.b32", ptx(kernel, **constants))


@pytest.mark.parametrize("leaves,tiles", [(1, matmul.SMALL), (1, matmul.MEDIUM), (1, matmul.LARGE), (4, matmul.TREE[4]), (8, matmul.TREE[8])])
def test_products_run_on_the_wide_matrix_unit(leaves, tiles):
    BM, BN, BK, warps, stages = tiles
    text = ptx(matmul.product_kernel, warps, stages, x=f"tensordesc<bf16[{BM}, {BK}]>", w=f"tensordesc<bf16[{BN}, {BK}]>", BIAS=False,
               LEAVES=leaves, PARK=leaves > 2, FLAT=leaves == 8, RAGGED=False, BM=BM, BN=BN, BK=BK, GROUP=8, EARLY=False)  # fmt: skip
    assert "wgmma" in text and not re.search(r"\bmma\.sync", text)
    assert "cp.async.bulk.tensor" in text


@pytest.mark.parametrize("tiles", sorted({tiles for pair in matmul.APART.values() for tiles in pair}))
def test_rows_that_fill_no_tile_are_copied_by_16_bytes(tiles):
    """Weights by the copy engine; of the distance between rows no more is known than what `copyable` sees to."""
    BM, BN, BK, warps, stages = tiles
    text = ptx(matmul.product_kernel, warps, stages, w=f"tensordesc<bf16[{BN}, {BK}]>", BIAS=False, LEAVES=1, PARK=False, FLAT=False, RAGGED=True,
               BM=BM, BN=BN, BK=BK, GROUP=8, EARLY=True)  # fmt: skip
    assert "wgmma" in text and "cp.async.bulk.tensor" in text and "cp.async.cg" in text and "cp.async.ca" not in text
    assert not re.search(r"\bld\.global\.", text)


@pytest.mark.parametrize("architecture", [80, 89, 100])
@pytest.mark.parametrize("name", ["rms_norm", "combine"])
def test_arithmetic_is_as_written_for_other_architectures(name, architecture):
    """All launches: python -m tests.gpu.compile_everywhere."""
    kernel, constants = FORWARD[name]
    text = ptx(kernel, architecture=architecture, **constants)
    assert f".target sm_{architecture}" in text and not re.search(r"fma\.\S*f32|div\.(approx|full)|\.ftz", text)


@pytest.mark.parametrize("architecture", [80, 89, 100])
def test_products_compile_for_other_architectures(architecture):
    BM, BN, BK, warps, stages = matmul.SMALL
    text = ptx(matmul.product_kernel, warps, stages, architecture, x=f"tensordesc<bf16[{BM}, {BK}]>", w=f"tensordesc<bf16[{BN}, {BK}]>", BIAS=False,
               LEAVES=1, PARK=False, FLAT=False, RAGGED=False, BM=BM, BN=BN, BK=BK, GROUP=8, EARLY=False)  # fmt: skip
    assert ("tcgen05" if architecture == 100 else "mma.sync") in text


def compiled(kernel, constants, kinds, blocks, aligned=(), **options):
    """-> (PTX, resources). ``kinds``: name -> type of the arguments that are no int32; ``blocks``: (type, *shape) of tensor descriptors; ``aligned``:
    integers that are multiples of 16."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else kinds.get(name, "i32")
        kind, *block = blocks.get(name, (None,))
        if kind:
            layout = gl.NVMMASharedLayout.get_default_for(block, {"bf16": gl.bfloat16, "fp32": gl.float32}[kind])
            signature[name] = f"tensordesc<{kind}{block},{layout!r}>"
        elif signature[name].startswith("*") or name in aligned:
            attributes[i,] = [["tt.divisibility", 16]]
    return ptx_and_resources(GluonASTSource(kernel, signature, constants, attributes), num_warps=4, **options)


def tree_product(leaves, copied, tile):
    """-> (PTX, resources); ``copied``: type of what the copy engine stores, None: it does not; ``tile``: of hopper.TILES."""
    from isoexec.ops.matmul import hopper

    rows, columns, stages, apart = hopper.TILES[tile]
    constants = dict(BIAS=False, COPIED=copied is not None, LEAVES=leaves, ROWS=rows, FIRST=columns[0], SECOND=columns[1], APART=apart,
                     BK=hopper.STEP, STAGES=stages, GROUP=hopper.GROUP[0], EARLY=copied is None)  # fmt: skip
    blocks = {"x": ("bf16", 64, hopper.STEP), "w": ("bf16", columns[0], hopper.STEP), "w_beside": ("bf16", columns[1], hopper.STEP)}
    blocks |= {"y": (copied, 64, columns[0]), "y_beside": (copied, 64, columns[1])} if copied else {}
    kinds = {"y": "*fp32", "y_beside": "*fp32", "bias": "*fp32"}
    return compiled(hopper.tree_product_kernel, constants, kinds, blocks, maxnreg=hopper.REGISTERS, launch_pdl=True)


@pytest.mark.parametrize(
    "rows,columns,tile,tiles,parts",
    [(129, 2048, 4, 96, 1), (256, 2048, 4, 128, 1), (300, 2048, 2, 110, 1), (512, 2048, 3, 128, 1), (768, 2048, 1, 132, 1), (1024, 2048, 0, 128, 1),
     (2048, 2048, 0, 256, 1), (8192, 2048, 0, 1024, 1), (150, 1280, 3, 40, 2), (300, 136, 3, 9, 8)],
)  # fmt: skip
def test_the_tile_whose_bytes_are_fewest(rows, columns, tile, tiles, parts):
    """Of 132 processors, as docs/gpu.md says; leaves are shared out where tiles are fewer than half of them."""
    from isoexec.ops.matmul import hopper

    assert hopper.form(rows, columns, 8, 132) == (hopper.TILES[tile], tiles, parts)


def paired_keys():
    """-> (PTX, resources)"""
    from isoexec.ops.attention import hopper

    constants = dict(G=8, REPEAT=4, K=hopper.CHANNELS, N=128, STAGES=hopper.STAGES)
    blocks = {name: ("bf16", 64, hopper.CHANNELS) for name in ("q", "grad", "keys", "values")}
    blocks |= {"lse": ("fp32", 64), "delta": ("fp32", 64), "saved": ("bf16", 64, 64)}
    kinds = {"grad_k": "*bf16", "grad_v": "*bf16", "cu_seqlens": "*i32", "scale": "fp32"}
    return compiled(hopper.paired_keys_kernel, constants, kinds, blocks, maxnreg=hopper.REGISTERS)


TREES = [(8, "bf16", tile) for tile in range(5)] + [(8, "fp32", 0), (8, "fp32", 1), (8, "fp32", 4), (2, "bf16", 0), (2, "bf16", 4), (4, None, 3), (1, None, 3)]


@pytest.mark.parametrize("leaves,copied,tile", TREES)
def test_the_tree_of_two_warpgroups_keeps_its_sums_in_registers(leaves, copied, tile):
    text, usage = tree_product(leaves, copied, tile)
    assert "wgmma" in text and "cp.async.bulk.tensor" in text and "setmaxnreg" in text
    assert ("griddepcontrol.launch_dependents" in text) == (copied is None) and "griddepcontrol.wait" in text
    assert ("cp.async.bulk.tensor.2d.global" in text) == bool(copied)
    assert not re.search(r"fma\.rn\.f32|\b(atom|red)\.", text)
    assert "LOCAL:0" in usage and "STACK:0" in usage, usage


def test_the_pass_by_keys_of_two_warpgroups():
    """P goes from registers to its product, and few addresses to the stack."""
    text, usage = paired_keys()
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16 +\{[^}]*\}, *\{", text)
    assert "cp.async.bulk.tensor.1d" in text and "setmaxnreg" in text and not re.search(r"\b(atom|red)\.", text)
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 16 and "LOCAL:0" in usage, usage


_DECODE = dict.fromkeys(("seq_lens", "query_start_loc", "block_table"), "*i32")


def chain(pairs, K, repeat):
    """The chain of decode for ``pairs`` of sequence and key head. -> PTX, resources, channels of a slice"""
    from isoexec.ops.attention import hopper_decode

    _, columns, stages = hopper_decode.settings(pairs, K, repeat, 132)
    constants = dict(REPEAT=repeat, R=4 * repeat, K=K, N=columns, TWO=hopper_decode.BLOCK[K] - 64, STAGES=stages)
    blocks = {"wide": ("fp32", 8, 32), "narrow": ("fp32", 8, min(hopper_decode.BLOCK[K] - 64, 32)), "values": ("bf16", 16, columns)}
    kinds = _DECODE | {"out": "*bf16", "lse": "*fp32", "scale": "fp32"}
    return *compiled(hopper_decode.chain_kernel, constants, kinds, blocks, maxnreg=hopper_decode._REGISTERS), columns


_MEETING = "barrier.sync 1"  # of all warps: no number of threads


def handed_over_in_order(text):
    """Whether all that the compiler hands warps with roles (which, and arguments) is written and read on two sides of barriers of all warps.

    The first warps write it, meet the others, who read it before they meet again; what tells the others to end is written after one more meeting.
    """
    lines = (re.sub(r"\s+", " ", line.split("//")[0]).strip().rstrip(";") for line in text.splitlines())
    program = [line for line in lines if line and not line.startswith((".loc", "setmaxnreg", "$L__tmp"))]
    written = [i for i, line in enumerate(program) if re.match(r"st\.shared\S* \[global_smem\+", line)]
    groups = [i for i in written if i - 1 not in written]
    ends = [next(j for j in range(i, len(program)) if j not in written) for i in groups]
    roles = [i for i, line in enumerate(program) if line.startswith("ld.shared.b8")]
    arguments = [i for i, line in enumerate(program) if re.match(r"ld\.shared\S* .*\[global_smem\+", line)]
    after = [next(line for j, line in enumerate(program[i:], i) if j not in arguments) for i in arguments]
    before = [next(line for line in program[i - 1 :: -1] if not line.startswith(("mov.", "add."))) for i in roles]
    # A program without work jumps there, and has given no role before.
    last = next((line for line in program[groups[-1] - 1 :: -1] if not line.endswith(":")), None) if groups else None
    return (
        len(groups) == 2
        and len(roles) == 1
        and all(program[end] == _MEETING for end in ends)
        and program[ends[0] + 1] == last == _MEETING
        and before == [_MEETING]
        and set(after) <= {_MEETING}
    )


_ROLES = [*(("tree_product_kernel", tile) for tile in range(5)), ("paired_keys_kernel", 0), *(("chain_kernel", K) for K in (128, 192, 256))]


@pytest.mark.parametrize("kernel", _ROLES, ids=str)
def test_warps_with_roles_get_them_between_barriers(kernel):
    """racecheck names these accesses, and confirms no barrier that warps reach from several places (docs/gpu.md)."""
    name, which = kernel
    make = {"tree_product_kernel": lambda: tree_product(8, "bf16", which), "paired_keys_kernel": paired_keys, "chain_kernel": lambda: chain(32, which, 8)}
    text = make[name]()[0]
    assert name in text and handed_over_in_order(text)
    meetings = list(re.finditer(r"barrier\.sync\s+1;", text))
    broken = [handed_over_in_order(text[: m.start()] + text[m.end() :]) for m in meetings]
    assert broken.count(False) >= 5, "a barrier left out shows"


@pytest.mark.parametrize("tile", range(5))
def test_one_thread_arrives_for_a_warpgroup_once_a_barrier_among_it_has_passed(tile):
    """So what its threads stored, and the tiles they read, lie before the arrival that others wait for; racecheck does not follow that."""
    text, _ = tree_product(8, "bf16", tile)
    arrival = r"mbarrier\.arrive\.shared"
    after_a_barrier = rf"bar\.sync[^\n]*\n(?:\s*(?://|\.loc)[^\n]*\n|\s*(?:setp|and|selp|add|shl)\.[^\n]*\n)*\s*@\S+ {arrival}"
    assert len(re.findall(after_a_barrier, text)) == len(re.findall(arrival, text)) >= 4


@pytest.mark.parametrize("K", [128, 192, 256])
def test_scores_of_decode(K):
    from isoexec.ops.attention import hopper_decode

    kinds = _DECODE | {"q": "*bf16", "keys": "*bf16", "scores": "*fp32"}
    constants = dict(REPEAT=8, K=K, N=128 if K == 128 else 256, STAGES=hopper_decode._SCORE_STAGES)
    text, usage = compiled(hopper_decode.scores_kernel, constants, kinds, {}, aligned=("q_token", "q_head", "k_page", "k_token", "k_head"))
    assert len(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n64k16", text)) == constants["N"] // 16
    assert re.findall(r"cp\.async\.\S+ \[[^]]*\], *\[[^]]*\], *(\w+)", text).count("0x10") > 0 and not re.search(r"fma\.|\b(atom|red)\.", text)
    assert "LOCAL:0" in usage and "STACK:0" in usage, usage


@pytest.mark.parametrize("repeat", [8, 16])
@pytest.mark.parametrize("K", [128, 192, 256])
@pytest.mark.parametrize("pairs", [2, 32])
def test_the_chain_of_decode_is_of_the_provider_s_operations(K, repeat, pairs):
    """Probabilities go from registers to their product; every operation flushes, and one of a block's additions to a lane's row sum is contracted."""
    from isoexec.ops.attention.hopper_decode import BLOCK

    text, usage, columns = chain(pairs, K, repeat)
    products = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{columns}k16\.f32\.bf16\.bf16 +\{{[^}}]*\}}, *\{{", text)
    assert len(products) == 2 * BLOCK[K] // 16 and "cp.async.bulk.tensor.2d" in text and "setmaxnreg" in text
    lanes = 2 if repeat == 16 else 1  # rows of a thread
    blocks_inside = 2  # the last, and one of the loop
    assert len(re.findall(r"fma\.rn\.ftz\.f32", text)) == blocks_inside * lanes * (BLOCK[K] // 4 + 1) + lanes
    assert len(re.findall(r"add\.ftz\.f32", text)) == blocks_inside * lanes * BLOCK[K] // 4
    assert len(re.findall(r"ex2\.approx\.ftz\.f32", text)) == blocks_inside * lanes * (BLOCK[K] // 4 + 1)
    assert not re.search(r"fma\.rn\.f32|(mul|ex2\.approx)\.f32|\b(atom|red)\.", text)
    assert "LOCAL:0" in usage and "STACK:0" in usage, usage


@pytest.mark.parametrize("which", [0, -1], ids=["few rows per expert", "many"])
def test_experts_run_on_the_wide_matrix_unit(which):
    rows, columns, step, exchanged, warps, stages = list(triton_grouped.FORMS.values())[which].gate_up
    text = ptx(triton_grouped.gate_up_kernel, warps, stages, w=f"tensordesc<bf16[{columns}, {step}]>", count="*i32", tiles="*i32", TOP=8, SAVE=False, BM=rows, BN=columns, BK=step,
               EXCHANGED=exchanged, GROUP=8)  # fmt: skip
    assert "wgmma" in text and not re.search(r"\bmma\.sync", text)
    assert not re.search(r"fma\.rn\.f32|div\.(approx|full)|\b(atom|red)\.", text)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("K", [64, 256])
def test_attention_runs_on_the_wide_matrix_unit(K, paged):
    constants = dict(G=4, REPEAT=4, K=K, N=K, ROWS=64, KV=64, PAGED=paged)
    text = ptx(attention.forward_kernel, 4, 2 if K <= 128 else 1, **constants)
    assert "wgmma" in text and not re.search(r"\bmma\.sync", text)
    assert not re.search(r"fma\.rn\.f32|div\.(approx|full)|\b(atom|red)\.", text)
