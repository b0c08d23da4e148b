"""compute-sanitizer over every kernel of the family, on small shapes of every case that has gates; the result is written beside them:

    python -m tests.gdn.sanitize gpu_results.json [--commit HASH] [--limit SECONDS]

Each tensor is an allocation of its own, so that memcheck sees an access outside it. A planted one must be found.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
import triton.language as tl

from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal
from isoexec.ops.gdn import launch
from tests.gdn import gates
from tests.gdn.cases import F32, inputs, one_shot
from tests.gdn.gate_tools import engine, entries, ints
from tests.gdn.gradient_cases import gradients

TOOLS = ("memcheck", "racecheck")
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)")
ACCESS = re.compile(r"access at (\w+)\+\S+ in (\w+\.py):(\d+)")
#: Name -> form and C of the core; the ops around it are a case of their own.
CASES = {f"{form} C={chunk}": (form, chunk) for form, chunk in gates.CASES}
EDGES, PLANTED = "edges", "planted"
FEW = dict(H=1, HV=2)
HEADS = (1, 2, 128, 128)


def every_kernel() -> set[str]:
    """Names of the family's kernels."""
    folder = Path(launch.__file__).parent
    nodes = (node for path in folder.glob("kernels*.py") for node in ast.walk(ast.parse(path.read_bytes())))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")}


def core(form, chunk):
    """Trainer with gradients (few and many sequences), prefill in pieces, decode in one launch and two."""
    lengths = [2 * chunk + 5, 0, 1, 70]
    x = inputs(lengths, K=128, V=128, device="cuda", **FEW)
    base = one_shot(x, lengths, chunk, form)
    for narrow in (launch.settings("limits")["narrow"], 0):
        with entries("limits", None, **{**launch.settings("limits"), "narrow": narrow}):
            gradients(form, x, lengths, chunk, x[2])
            assert_bit_equal(one_shot(x, lengths, chunk, form), base, "trainer")
    for two in (0, 1):
        stage = {**launch.settings("decode_main" if two else "decode", chunk), "two_launches": two}
        apart = {**launch.settings("limits"), "hopper_chunks": 1 if two else 1 << 30}
        with entries("decode", chunk, **stage), entries("limits", None, **apart):
            run = engine(form, x, lengths, chunk, [3, 0, 2, 1], **FEW)
            run.prefill({0: chunk + 3, 3: 60})
            run.prefill({0: chunk - 6, 1: 0, 3: 5})  # the steps that are left fill a chunk
            run.decode([0, 2])
            assert_bit_equal(run.finish().o, base, "split")
    pool, (q, k, v, g, beta) = run.pool, x
    getattr(gdn, f"{form}_decode")(q[:2], k[:2], v[:2], g[:2], beta[:2], pool, ints(-1, 0), ints(3, 3), null_slot=0, out_dtype=F32)


def edges():
    """The ops around the core with their gradients, and the fused decode steps."""
    (H, HV, K, V), lengths = HEADS, [20, 0, 1, 7]
    T, D = sum(lengths), 2 * H * K + HV * V
    draw = lambda *s: torch.randn(*s, device="cuda").bfloat16()
    values = [draw(T, D), draw(T, HV), draw(T, HV), draw(D, 4), torch.rand(HV, device="cuda"), torch.rand(HV, device="cuda")]
    plan, resumed, window = gdn.Plan(lengths, 16, None, "cuda"), gdn.Plan(lengths, 16, [0, 3, 4, 0], "cuda"), draw(4, 3, D)
    leaves = [t.clone().requires_grad_() for t in values]
    fused = gdn.mixer_inputs(*leaves, plan, *HEADS)
    y = gdn.conv1d(leaves[0], leaves[3], plan)[0]
    apart = gdn.l2norm(y[:, : H * K].unflatten(-1, (H, K))), *gdn.gating(leaves[1], leaves[2], *leaves[4:])
    for outs in (fused[:5], (y, *apart)):
        torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs], retain_graph=True)
    gdn.mixer_inputs(*values, resumed, *HEADS, window=window)
    gdn.conv1d(values[0], values[3], resumed, window)
    x, a, b, weight, A_log, dt_bias = values
    slots, z, norm_weight = ints(2, -1, 1), draw(3, HV, V), draw(V)
    pool = gdn.StatePool.empty(3, *HEADS, 16, "cuda")
    gdn.conv1d_step(x[:3], weight, window, slots)
    gdn.mixer_step_inputs(x[:3], a[:3], b[:3], weight, A_log, dt_bias, window, slots, *HEADS)
    for t in range(17):
        gdn.cpr_wy_step(x[:3], a[:3], b[:3], A_log, dt_bias, pool, slots, ints(t, t, t), *HEADS)
    for t in range(17):
        gdn.mixer_step(x[:3], a[:3], b[:3], z, weight, A_log, dt_bias, norm_weight, window, pool, slots, ints(t, t, t), *HEADS)


@triton.jit
def _planted_kernel(x, n):
    at = tl.program_id(0) * 32 + tl.arange(0, 32)
    tl.store(x + at, 1.0, mask=at < n)


def small(path: str, case: str) -> None:
    """What runs under the tool, of one of `CASES` or the planted write; leaves the names of the kernels that were launched."""
    launched: set[str] = set()
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: launched.add(metadata.get()["name"]))
    planted = case == PLANTED
    with contextlib.suppress(RuntimeError) if planted else contextlib.nullcontext():
        if planted:
            x = torch.zeros(128, device="cuda")
            _planted_kernel[4 + (1 << 20),](x, 1 << 30)  # far past its end
        elif case == EDGES:
            edges()
        else:
            core(*CASES[case])
        torch.cuda.synchronize()
    Path(path).write_text(json.dumps(sorted(launched)))


def checked(tool: str, case: str, limit_s: int) -> dict:
    """-> {version, errors, accesses, launched} of one case under ``tool``; accesses: those that racecheck names, as `explained` takes them.

    Raises:
        RuntimeError: it did not come to an end, or said no number of errors.
    """
    binary = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "launched.json")
        command = [binary, "--tool", tool, "--print-limit", "100", sys.executable, "-m", "tests.gdn.sanitize", str(listed), "--small", case]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"compute-sanitizer --tool {tool}, {case}: not at an end after {limit_s} s") from None
        summary, names = SUMMARY.search(done.stdout), json.loads(listed.read_text()) if listed.is_file() else None
    if summary is None or (names is None and case != PLANTED):
        raise RuntimeError(f"compute-sanitizer --tool {tool}, {case}: {done.stdout[-1500:]} {done.stderr[-1500:]}")
    version = re.search(r"[Vv]ersion (\S+)", subprocess.run([binary, "--version"], capture_output=True, text=True).stdout)
    if errors := int(summary[1]):
        print(done.stdout[:3000] if case != PLANTED else f"planted: {errors} errors found", flush=True)
    accesses = ACCESS.findall(done.stdout) if tool == "racecheck" else []
    if tool == "racecheck" and len(accesses) != done.stdout.count("access at"):
        raise RuntimeError(f"compute-sanitizer --tool {tool}, {case}: an access without a source line: {done.stdout[:3000]}")
    run = {"version": version[1] if version else "", "errors": errors, "accesses": sorted(set(accesses))}
    return {**run, "launched": sorted(set(names or ()) & every_kernel())}


def explained(accesses) -> bool:
    """Whether accesses (kernel, file, line) are all of the two hand-overs between warps with roles that docs/gdn.md names."""
    lines = {name: (Path(launch.__file__).parent / name).read_text().splitlines() for name in {file for _, file, _ in accesses}}
    arguments = ("def chain_roles_kernel(", "gl.warp_specialize(")
    products = ("qs_ring.index(held).store(qs)", "qs = qs_ring.index(held).load(ROW)")
    named = lambda file, line: lines[file][int(line) - 1].strip().startswith(arguments + products)
    return all(kernel == "chain_roles_kernel" and named(file, line) for kernel, file, line in accesses)


def together(runs: dict[str, dict]) -> dict:
    """One tool's runs of several cases: errors added, kernels together."""
    launched = set().union(*(run["launched"] for run in runs.values()))
    versions, errors = {run["version"] for run in runs.values()}, sum(run["errors"] for run in runs.values())
    accesses = sorted({tuple(access) for run in runs.values() for access in run["accesses"]})
    return {"version": ", ".join(versions), "errors": errors, "accesses": accesses, "cases": list(runs), "launched": sorted(launched)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="record to which the result is added")
    parser.add_argument("--commit", default="", help="of this tree, where git is not at hand")
    parser.add_argument("--small", metavar="CASE", help="run the kernels of CASE, write the names of those launched to PATH")
    parser.add_argument("--limit", type=int, default=420, help="seconds for a case under one tool (default: %(default)s)")
    options = parser.parse_args()
    if options.small:
        small(options.path, options.small)
        return 0
    commit = options.commit or subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], text=True).strip()
    found: dict[str, dict] = {tool: {} for tool in TOOLS}
    unproven = []
    with ThreadPoolExecutor(16) as threads:
        control = threads.submit(checked, "memcheck", PLANTED, options.limit)
        waiting = {(tool, case): threads.submit(checked, tool, case, options.limit) for case in (*CASES, EDGES) for tool in TOOLS}
        for (tool, case), run in waiting.items():
            try:
                found[tool][case] = run.result()
            except RuntimeError as error:
                unproven.append(f"{tool}, {case}")
                print(error, flush=True)
        if not control.result()["errors"]:
            raise RuntimeError("memcheck did not find the planted write outside an allocation")
    tools = {tool: together(runs) for tool, runs in found.items() if runs}
    path = Path(options.path)
    record = json.loads(path.read_text()) if path.is_file() else {}
    record["sanitizer"] = {"commit": commit, "device": torch.cuda.get_device_name(), "kernels": launch.digest(), "tools": tools}
    path.write_text(json.dumps(record, indent=1) + "\n")
    missed = {tool: sorted(every_kernel() - set(result["launched"])) for tool, result in tools.items()}
    errors = {tool: result["errors"] for tool, result in tools.items()}
    print("sanitizer:", errors, "not launched:", missed, "no result:", unproven, flush=True)
    errors = sum(result["errors"] for result in tools.values() if not (result["accesses"] and explained(result["accesses"])))
    return errors + sum(map(len, missed.values())) + len(unproven)


if __name__ == "__main__":
    sys.exit(main())
