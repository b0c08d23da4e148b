"""The way of the weights from policy to engines: a handshake, the transfer, a flushed prefix cache, the comparison of what arrived.

On the CPU a safetensors file in shared memory passes them. On GPUs that policy and engines share, their own memory does. Between GPUs, and
without a contract, SkyRL's senders do, fed by isoexec's mapping, or the file where a model keeps some parameters in fp32.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from loguru import logger
from skyrl.backends.skyrl_train.weight_sync import WeightChunk, WeightExtractor

from isoexec.runtimes.handshake import check_process_served, check_weights, handshake, process_identity
from isoexec.runtimes.megatron.checkpoint import manifest_of_ranks
from isoexec.runtimes.megatron.exchange import gather_texts
from isoexec.runtimes.megatron.hf_files import HFFiles
from isoexec.runtimes.megatron.mapping import entries
from isoexec.runtimes.skyrl import ipc
from isoexec.runtimes.skyrl.config import SYNC_VARIABLE, uses_gpus
from isoexec.runtimes.skyrl.tensors import write_tensors


def make_sync(worker) -> Sync:
    """The transfer that this machine and this run have, and that the model's dtypes allow: SkyRL's buffers hold one."""
    if not uses_gpus():
        return SharedMemorySync(worker)
    if worker.contract is not None and worker.cfg.placement.colocate_all:
        return IpcSync(worker)
    one_dtype = not any(entry.fp32 for entry in entries(worker.hf_config))
    return UpstreamSync(worker) if one_dtype else SharedMemorySync(worker)


class Sync:
    """One policy worker's part in every sync of a run; each rank has one, and all of them call.

    Args:
        worker: :class:`isoexec.runtimes.skyrl.worker.PolicyWorker`.
    """

    def __init__(self, worker):
        self.worker = worker
        self._syncs = 0
        self._replayed = 0  # captured decode steps of all engines, when they were asked last

    async def begin(self, client, engine_config) -> None:
        """Once, before the first sync."""
        if dist.get_rank() == 0:
            await client.call("isoexec_follow_parent")
        dist.barrier()

    async def run(self, client, engine_config) -> None:
        """Handshake, transfer, flush, comparison."""
        try:
            began = time.perf_counter()
            await self._shake_hands(client)
            shaken = time.perf_counter()
            await self._transfer(client, engine_config)
            sent = time.perf_counter()
            found, flushed = await self._flush_and_compare(client)
            done = time.perf_counter()
            if found:
                parts = {"handshake": shaken - began, "transfer": sent - shaken, "flush": flushed - sent, "comparison": done - flushed}
                replayed = f"{self._replayed} captured decode steps replayed so far"
                logger.info("; ".join((found, ", ".join(f"{name} {seconds:.4f} s" for name, seconds in parts.items()), replayed)))
            self._syncs += 1
            dist.barrier()
        finally:
            await client.teardown()  # a client reaches a worker anew for each sync

    async def _shake_hands(self, client) -> None:
        """Refuse to go on where a policy rank or an engine process is not the program that the contract names.

        Raises:
            ContractError: names the first entry that differs, both values and what to do.
        """
        if self.worker.contract is None:
            return
        if self._syncs:
            check_process_served(whole=self.worker.whole)
        ranks = gather_texts(process_identity("trainer", self.worker.folder).to_json())
        if dist.get_rank() != 0:
            return
        identities = {f"trainer {rank}": text for rank, text in enumerate(ranks)}
        identities |= {f"engine {n}": found["identity"] for n, found in enumerate(await client.call("isoexec_identity"))}
        for difference in handshake(self.worker.contract, identities):
            logger.info(f"the processes differ in what moves no bit: {difference}")
        if self._syncs:  # before the first sync no engine has sampled
            self._replayed = sum(found["replayed"] for found in await client.call("isoexec_check_served"))

    async def _flush_and_compare(self, client) -> tuple[str, float]:
        """Forget what the old weights computed, and refuse to go on where an engine does not hold the policy's weights, in the contract's
        dtypes. Both sides digest at once, and while the caches are flushed.

        Returns:
            What was found, on the rank that speaks with the engines (elsewhere, and without a contract, nothing); when the caches were
            flushed, after which only the comparison was waited for.

        Raises:
            ContractError: names the first tensor that differs, both values and what to do.
        """
        contract, speaks = self.worker.contract, dist.get_rank() == 0
        device = torch.cuda.device(torch.cuda.current_device()) if uses_gpus() else contextlib.nullcontext()

        def manifest():
            with device:  # each thread has one of its own
                return manifest_of_ranks(self.worker.begin_weight_digests())

        async def flush() -> float:
            if speaks:
                await client.reset_prefix_cache(reset_running_requests=True)
            return time.perf_counter()

        calls = [flush()]
        if contract is not None:  # a thread, since the requests are sent by this one
            calls.append(asyncio.to_thread(manifest))
            calls += [client.call("isoexec_weights")] if speaks else []
        answers = await asyncio.gather(*calls, return_exceptions=True)  # no call outlives this one
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        flushed, *manifests = answers
        if not speaks or contract is None:
            return "", flushed
        ours, theirs = manifests
        engines = {f"engine {n}": found["weights"] for n, found in enumerate(theirs)}
        version = check_weights(contract, {"trainer": ours} | engines)
        return f"weights {version[:12]}: {len(ours.tensors)} tensors equal in the policy and {len(engines)} engines", flushed

    async def _transfer(self, client, engine_config) -> None:
        raise NotImplementedError


class SharedMemorySync(Sync):
    """Through a file that the engines read, and that is gone when they have."""

    async def _transfer(self, client, engine_config) -> None:
        tensors = self.worker.hf_tensors()
        if dist.get_rank() != 0:
            return
        with tempfile.TemporaryDirectory(prefix="isoexec-", dir=os.environ.get(SYNC_VARIABLE)) as folder:
            path = Path(folder) / "model.safetensors"
            write_tensors(path, HFFiles(self.worker.folder).in_stored_form(tensors))
            await client.call("isoexec_load_weights", path=str(path))


class IpcSync(Sync):
    """Through memory of the GPU on which a policy rank and an engine live: buffers of any dtypes, whose handles pass."""

    async def _transfer(self, client, engine_config) -> None:
        limit = int(engine_config.weight_transfer_threshold_cuda_ipc_GB * (1 << 30))
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.empty_cache()
        with self.worker.memory_to_share():
            tensors = HFFiles(self.worker.folder).in_stored_form(self.worker.hf_tensors(device))
            for packed_entries, packed in ipc.pack(tensors.items(), limit, device):
                torch.cuda.synchronize()
                shared = dict(json.loads(text) for text in gather_texts(json.dumps([ipc.gpu(), ipc.share(packed)])))
                if dist.get_rank() == 0:
                    await client.call("isoexec_receive_weights", entries=packed_entries, shared=shared)
                dist.barrier()  # the engines have read it
                del packed
                torch.cuda.ipc_collect()
        if dist.get_rank() == 0:
            await client.call("isoexec_end_receiving")


class UpstreamSync(Sync):
    """Through SkyRL's senders."""

    async def begin(self, client, engine_config) -> None:
        await super().begin(client, engine_config)
        await self.worker.begin_upstream_sync(client, engine_config)
        self.worker.weight_extractor = MappedExtractor(self.worker)

    async def _transfer(self, client, engine_config) -> None:
        await self.worker.send_upstream(client, engine_config)


class MappedExtractor(WeightExtractor):
    """SkyRL's extractor by isoexec's mapping to HF names, one chunk per dtype."""

    def __init__(self, worker):
        self._worker = worker
        self._metadata: dict[str, list] | None = None

    def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:
        """Chunks of one dtype each.

        Raises:
            TypeError: a parameter is not of ``dtype``; SkyRL's buffers hold one, and a cast would change what the engine computes.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        tensors = self._worker.hf_tensors(device)
        other = sorted(name for name, tensor in tensors.items() if tensor.dtype != dtype)
        if other:
            raise TypeError(
                f"weight sync: expected {dtype} parameters, found {len(other)} others ({', '.join(other[:3])}); SkyRL's transfer carries "
                "one dtype"
            )
        names = list(tensors)
        yield WeightChunk(
            names=names,
            dtypes=[str(dtype)] * len(names),
            shapes=[list(tensors[name].shape) for name in names],
            tensors=list(tensors.values()),
        )

    def get_weight_metadata(self, dtype: torch.dtype) -> dict[str, list]:
        """Names, dtypes and shapes, in the order of :meth:`extract_weights`; of a policy they stay what they are."""
        if self._metadata is None:
            tensors = self._worker.hf_tensors(torch.device("cuda", torch.cuda.current_device()))
            self._metadata = {
                "names": list(tensors),
                "dtype_names": [str(dtype).removeprefix("torch.")] * len(tensors),
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
            }
        return self._metadata
