"""The kernels of whole chunks as they are launched, compiled for sm_90 without a GPU."""

import re

import pytest
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from isoexec.ops.gdn import kernels_roles, launch
from tests.gpu.offline import ptx_and_resources

H, HV, K, V = 16, 32, 128, 128
POINTERS = dict(o="*bf16", high="*bf16", low="*i16", slots="*i32", sequences="*i32", b_ws="*fp32", E_ws="*fp32")

ARRIVAL = "mbarrier.arrive.shared"
BARRIER_THEN_ARRIVAL = rf"bar\.sync[^\n]*\n(?:\s*(?://|\.loc)[^\n]*\n)*\s*@\S+ {re.escape(ARRIVAL)}"


def described(block, dtype):
    return f"tensordesc<{'fp32' if dtype == gl.float32 else 'bf16'}{block},{gl.NVMMASharedLayout.get_default_for(block, dtype)!r}>"


def compiled(kernel, arguments, constants, entry):
    """-> PTX and ptxas's resource usage."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else {**POINTERS, **arguments}.get(name, "i32")
        if signature[name].startswith("*") or name in ("v_row", "S_slot"):
            attributes[i,] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, attributes)
    return ptx_and_resources(source, num_warps=entry["num_warps"], maxnreg=entry["maxnreg"])


def assert_as_written(ptx):
    """No operation contracted, approximated to zero or left to an order of arrival."""
    assert "wgmma" in ptx and not re.search(r"fma\.rn\.f32|\b(atom|red)\.|\.ftz", ptx)


@pytest.mark.parametrize("chunk", [16, 32])
def test_warps_with_roles(chunk):
    entry = launch.settings("chain_roles", chunk, V)
    BV, registers = entry["BV"], entry["registers"]
    tiles = {name: described([chunk, width], gl.bfloat16) for name, width in (("q", 64), ("k", 64), ("v", BV), ("T", chunk), ("M", chunk))}
    gates = dict.fromkeys(("E", "b"), described([4 * chunk], gl.float32))
    constants = dict(H=H, HV=HV, K=K, V=V, C=chunk, BV=BV, STAGES=entry["stages"], HELD=entry["held"], WARPS=entry["output_warps"],
                     REGISTERS=(registers, registers))  # fmt: skip
    ptx, usage = compiled(kernels_roles.chain_roles_kernel, {**tiles, **gates}, constants, entry)
    assert_as_written(ptx)
    assert f"wgmma.mma_async.sync.aligned.m64n{2 * chunk}k16" in ptx  # of the state with keys and queries together
    assert "cp.async.bulk.tensor" in ptx and "setmaxnreg" in ptx
    # One thread arrives for its warps once a barrier among them has passed, so what they stored and read lies before it.
    assert len(re.findall(BARRIER_THEN_ARRIVAL, ptx)) == ptx.count(ARRIVAL) == 2
    assert "LOCAL:0" in usage and "STACK:0" in usage, usage  # all of a state in registers
