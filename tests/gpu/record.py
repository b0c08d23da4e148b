"""Runs this folder's tests on a GPU and writes what came of it."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
import triton

from isoexec.ops._core.provider import PROVIDERS
from tests.gpu.sources import digests

HERE = Path(__file__).parent
RECORD = "gpu_results.json"
PROCESSES = 10
#: They say something about the record, or about a machine without a GPU.
LEFT_OUT = ("test_recorded.py", "test_interpreted.py", "test_compile.py")


def parse(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.record", description=__doc__)
    parser.add_argument("commit", metavar="COMMIT", help="commit that runs, as the record shall name it")
    parser.add_argument("result", metavar="RESULT.json", nargs="?", type=Path, default=HERE / RECORD, help=f"default: {RECORD}")
    return parser.parse_args(arguments)


def main(commit: str, result: Path) -> bool:
    files = sorted(path for path in HERE.glob("test_*.py") if path.name not in LEFT_OUT)
    run = dict(commit=commit, date=datetime.date.today().isoformat(), sources=digests(), unfinished=[path.name for path in files], passed=[], other={})
    record = dict(
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=triton.__version__,
        providers={p.name: p.sha256 for p in PROVIDERS.values()},
        runs=[run],
    )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES) as together:

        def cases_of(path):
            report = Path(folder, f"{path.stem}.xml")
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(path)]
            done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
            print(path.name, done.stdout[-3000:] if done.returncode else done.stdout.splitlines()[-1], flush=True)
            return path.name, list(ElementTree.parse(report).iter("testcase"))

        for ended in as_completed([together.submit(cases_of, path) for path in files]):
            name, cases = ended.result()
            run["unfinished"].remove(name)
            for case in cases:
                count(case, run)
            result.write_text(json.dumps(record, indent=1) + "\n")  # as they come: a run that is cut leaves what had ended
    return bool(run["passed"]) and not run["other"]


def count(case, run) -> None:
    name = f"{case.get('classname').rsplit('.', 1)[-1]}::{case.get('name')}"
    outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
    if outcome is None:
        run["passed"] = sorted([*run["passed"], name])
    else:
        run["other"][name] = f"{outcome.tag}: {(outcome.get('message') or '').splitlines()[0][:300]}"


if __name__ == "__main__":
    raise SystemExit(0 if main(**vars(parse())) else 1)
