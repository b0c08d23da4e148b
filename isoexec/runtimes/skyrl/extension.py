"""What an engine's worker process answers beside vLLM's own calls; values travel as JSON."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import torch
from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import NewInferenceWorkerWrap
from vllm.distributed.parallel_state import get_tp_group

from isoexec.contract import ContractError
from isoexec.runtimes.handshake import check_process_served, process_identity
from isoexec.runtimes.skyrl import ipc
from isoexec.runtimes.skyrl.tensors import read_tensors, write_tensors
from isoexec.runtimes.vllm import graphs, weights
from isoexec.runtimes.vllm.engine import load_in_place, replace_weights


def _answering(method):
    """A refusal travels as ``{"refused": text}``: vLLM would answer with an error that does not say why."""

    @functools.wraps(method)
    def answer(self, *args, **kwargs) -> dict:
        try:
            return method(self, *args, **kwargs)
        except ContractError as error:
            return {"refused": str(error)}

    return answer


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

    @_answering
    def isoexec_identity(self) -> dict:
        """``{"identity": JSON text}`` of this process under its contract.

        Raises:
            ContractError: no contract is active, or the installation or the checkpoint is not the contract's.
        """
        return {"identity": process_identity("engine", self.model_config.model).to_json()}

    @_answering
    def isoexec_weights(self) -> dict:
        """``{"weights": manifest}`` of what the model holds now.

        Raises:
            ContractError: a parameter or buffer has no HF name.
        """
        return {"weights": weights.manifest(self.model_runner.get_model()).data()}

    @_answering
    def isoexec_check_served(self) -> dict:
        """``{"served": calls by case, "replayed": captured decode steps so far}`` of a process that has sampled.

        Raises:
            ContractError: an op ran undeclared, did not run, or ran other code than the contract names.
        """
        return {"served": check_process_served(), "replayed": sum(graphs.replays().values())}

    @_answering
    def isoexec_load_weights(self, path: str) -> dict:
        """Replace every parameter by the tensors of a safetensors file, in place.

        Args:
            path: under HF names, every tensor of the model.

        Raises:
            ValueError: a parameter is missing.
        """
        replace_weights(self.model_runner, read_tensors(path))
        return {}

    @_answering
    def isoexec_receive_weights(self, entries: list, shared: dict) -> dict:
        """Replace the parameters that lie in a buffer of this GPU, in place; :meth:`isoexec_end_receiving` ends the sync.

        Args:
            entries: of :func:`isoexec.runtimes.skyrl.ipc.pack`, under HF names.
            shared: of :func:`isoexec.runtimes.skyrl.ipc.share`, by GPU.

        Raises:
            ContractError: no policy rank has this GPU, or a parameter has moved.
        """
        if ipc.gpu() not in shared:
            raise ContractError(f"weight sync: expected a policy rank on GPU {ipc.gpu()}, found {', '.join(shared)}; colocate them")
        self._received = getattr(self, "_received", set())
        self._received |= load_in_place(self.model_runner.get_model(), ipc.unpack(entries, ipc.opened(shared[ipc.gpu()])))
        torch.cuda.synchronize()  # read, before the owner hears that it may be freed
        return {}

    @_answering
    def isoexec_end_receiving(self) -> dict:
        """The last buffer of a sync was received.

        Raises:
            ContractError: a parameter was in none.
        """
        missing = {name for name, _ in self.model_runner.get_model().named_parameters()} - self.__dict__.pop("_received", set())
        if missing:
            raise ContractError(f"weight sync: no values for {sorted(missing)}; the model mixes old and new ones: load a whole checkpoint")
        return {}

    @_answering
    def isoexec_save_weights(self, path: str) -> dict:
        """Write every tensor that the model holds now to a safetensors file, under the names of the manifest; of several ranks the first writes.

        Raises:
            ContractError: a parameter or buffer has no HF name.
        """
        tensors = dict(weights.hf_tensors(self.model_runner.get_model()))
        if get_tp_group().rank_in_group == 0:
            write_tensors(path, tensors)
        return {}
