"""NVIDIA's compute-sanitizer over every launch of launches.py. Triton kernels are compiled by a first run without the tool."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck")
RESULT = Path(__file__).with_name("sanitized.json")


def check(command: list[str], tool: str, timeout: int = 300) -> dict:
    """{tool, version, errors, summary}; errors None: the tool did not come to an end."""
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1:]
    found = dict(tool=tool, version=" ".join(version), errors=None)
    try:
        run = subprocess.run(["compute-sanitizer", "--tool", tool, *command], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        return dict(found, summary=f"no end within {timeout} s: {(error.stdout or b'')[-300:]!r}")
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", run.stdout)
    lines = [line for line in run.stdout.splitlines() if line.startswith("=========")]
    if summaries:
        found["errors"] = sum(map(int, summaries))
    return dict(found, status=run.returncode, summary="\n".join(lines[-1:] if found["errors"] == 0 else lines) or run.stderr[-500:])


def workload():
    import torch

    from tests.gpu import launches

    for name, case in launches.every(launches.SMALL, "cuda"):
        case()
        torch.cuda.synchronize()
        print(name, flush=True)
    from isoexec.ops.matmul import hopper

    x, w = torch.randn(300, 1024, device="cuda").bfloat16(), torch.randn(6000, 1024, device="cuda").bfloat16()
    for leaves, columns, tile in ((2, 6000, hopper.TILES[0]), (4, 6000, hopper.TILES[0]), *((8, 6000, tile) for tile in hopper.TILES), (8, 200, None)):
        hopper.product(x, w[:columns], torch.bfloat16, None, leaves, tile)  # a narrow weight has fewer tiles than there are processors
        torch.cuda.synchronize()
        print("matmul, hopper,", leaves, "leaves,", columns, "columns,", f"{tile.rows} x {tile.columns}" if tile else "shared out", flush=True)
    from isoexec.ops.attention import hopper_decode

    for H, G, K, page in ((16, 2, 256, 16), (8, 4, 128, 48), (16, 1, 192, 32)):
        q, cache = torch.randn(4, H, K, device="cuda").bfloat16(), torch.randn(40, page, G, K, device="cuda").bfloat16()
        table, start = torch.randperm(40, device="cuda").to(torch.int32).view(4, 10), torch.arange(5, dtype=torch.int32, device="cuda")
        lengths = torch.tensor([0, 1, 81, 160], dtype=torch.int32, device="cuda")
        hopper_decode.attend(q, cache, cache, table, lengths, start, K**-0.5)
        torch.cuda.synchronize()
        print("attention.paged, hopper_decode,", K, flush=True)


def parse(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__)
    parser.add_argument("result", metavar="RESULT.json", nargs="?", type=Path, default=RESULT, help="default: the committed one")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS, help="which of the tools to run; default: all")
    parser.add_argument("--workload", action="store_true", help="the launches themselves, without a tool: what the tools run")
    return parser.parse_args(arguments)


def main(result: Path, tools):
    from tests.gpu.sources import digests

    command = [sys.executable, "-m", "tests.gpu.sanitize", "--workload"]
    first = subprocess.run(command, capture_output=True, text=True)
    found = dict(sources=digests(), launches=first.stdout.splitlines(), failed=first.stderr[-800:] if first.returncode else "", tools=[])
    with ThreadPoolExecutor() as together:
        for one in together.map(lambda tool: check(command, tool), tools):
            found["tools"].append(one)
            result.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(one)[:1500], flush=True)


if __name__ == "__main__":
    options = parse()
    workload() if options.workload else main(options.result, options.tools)
