"""Runs this folder's kernel tests under Triton's interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


#: Files that share a process: a start costs seconds, and one process for all would be a long test.
TOGETHER = (("test_moe.py", "test_sampling.py"), ("test_attention.py", "test_matmul.py"))
ALONE = ("test_interpreted.py", "test_compile.py", "test_recorded.py")


def groups():
    named = {name for group in TOGETHER for name in group}
    rest = sorted(p.name for p in HERE.glob("test_*.py") if p.name not in named and p.name not in ALONE)
    return [*TOGETHER, tuple(rest)]


@pytest.mark.skipif(torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="the tests run directly")
@pytest.mark.parametrize("files", groups(), ids=lambda files: files[0])
def test_under_the_interpreter(files):
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in files)]
    run = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout, run.stdout[-1000:]
