"""Runs this folder's kernel tests under Triton's interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="the tests run directly")
def test_under_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = sorted(str(p) for p in HERE.glob("test_*.py") if p.name not in ("test_interpreted.py", "test_compile.py", "test_recorded.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout, run.stdout[-1000:]
