"""Runs a function on several gloo processes, forked from a server that has imported megatron-core and done nothing else.

Importing takes longer than these tests compute; a process that has computed cannot be forked safely (its threads are gone in the child).
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.poison import unwritten_memory


def on_ranks(count: int, function, *arguments, timeout: float = 300) -> list:
    """function(*arguments) on ``count`` ranks with the default group initialised, in poisoned memory; returns each rank's result.

    The ranks' environment is that of the first call: ``function`` sets ISOEXEC_CONTRACT itself.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["isoexec.runtimes.megatron.trainer"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            ranks.append(context.Process(target=_run, args=(theirs, folder, rank, count, function, arguments, timeout)))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return [_answer(pipe, rank, timeout) for rank, pipe in enumerate(pipes)]
        finally:
            for process in ranks:
                process.join(5)
                process.kill()
                process.join()


def _answer(pipe, rank: int, timeout: float):
    assert pipe.poll(timeout), f"rank {rank} gave no answer within {timeout} s"
    kind, value = pipe.recv()
    assert kind == "result", f"rank {rank}:\n{value}"
    return value


def _run(pipe, folder: str, rank: int, count: int, function, arguments, timeout: float) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(os.path.join(folder, "store"), count)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout))
        with unwritten_memory(poisoned=True):
            answer = ("result", function(*arguments))
        dist.barrier()
    except BaseException:
        answer = ("error", traceback.format_exc())
    pipe.send(answer)
    pipe.close()
