"""patches/skyrl: the Megatron worker's module imports where Megatron-Bridge is not installed."""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib.util, sys
assert importlib.util.find_spec("megatron.bridge") is None
import skyrl.backends.skyrl_train.workers.megatron.megatron_worker as worker
assert worker.AutoBridge is None
print(worker.MegatronPolicyWorkerBase.__name__, worker.__file__)
"""


@pytest.mark.timeout(600)
def test_worker_imports_without_the_bridge():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    name, path = done.stdout.split()[-2:]
    assert name == "MegatronPolicyWorkerBase" and "/build/" in path
