"""What an engine's worker process answers beside vLLM's own calls; values travel as JSON."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import NewInferenceWorkerWrap

from isoexec.contract import active_contract
from isoexec.runtimes import evidence
from isoexec.runtimes.skyrl.tensors import read_tensors
from isoexec.runtimes.vllm.engine import replace_weights


class EngineExtension(NewInferenceWorkerWrap):
    """Mixed into vLLM's worker; SkyRL's weight transfers for GPUs stay."""

    def isoexec_follow_parent(self) -> None:
        """End this process with the one that started it, however that one ends: a killed server leaves no engine behind."""
        parent = os.getppid()

        def watch():
            while os.getppid() == parent:
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="isoexec-follow-parent", daemon=True).start()

    def isoexec_identity(self) -> dict:
        """Identity of this process under its contract, or {} without one."""
        contract = active_contract()
        return {} if contract is None else json.loads(evidence.identity(contract, "engine").to_json())

    def isoexec_load_weights(self, path: str) -> dict:
        """Replace every parameter by the tensors of a safetensors file, in place.

        Args:
            path: under HF names, every tensor of the model.

        Raises:
            ValueError: a parameter is missing.
        """
        replace_weights(self.model_runner, read_tensors(path))
        return {}
