"""What the weight manifest costs: ``python -m bench.manifest [--device cpu|cuda] [--commit HASH] [--out FILE]``.

On a CPU: the trainer's manifest against a step of its own (scoring, and one optimizer step; a run samples besides, and syncs). On a GPU:
the digests of 2 GiB of weights against the bare transfer of the same bytes to another process, as SkyRL's does it between sides that
share a GPU: joined in one buffer, its CUDA IPC handle sent, copied from there into the parameters. What a sync does besides (mapping of
names, HTTP and Ray, the engine's loader, the cache flush) is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench import table
from isoexec.ops._core.digest import tensors_digest

REPEATS = 5
#: Layers of Qwen3 8B: 2.2 GiB in 42 tensors.
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4096,), (4096,)) * 6 + ((6144, 4096),) * 6


def seconds(function) -> float:
    """Median of repeated calls."""
    function()
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def on_the_cpu(architecture: str) -> None:
    """Prints the manifest's share of a step."""
    import os

    from isoexec.contract import CONTRACT_VARIABLE, contract_for_model
    from isoexec.runtimes.megatron.trainer import PolicyTrainer
    from isoexec.verify.checkpoint import make_checkpoint

    with tempfile.TemporaryDirectory(prefix="isoexec-bench-") as work:
        model, contract = Path(work) / "model", Path(work) / "contract.json"
        make_checkpoint(model, architecture)
        contract.write_text(contract_for_model(str(model), "cpu").to_json())
        os.environ[CONTRACT_VARIABLE] = str(contract)
        trainer = PolicyTrainer(model, lr=1e-4)
        sequences = [(list(range(3, 67)), list(range(70, 134))) for _ in range(32)]
        packing = [list(range(at, at + 8)) for at in range(0, 32, 8)]

        def step():
            trainer.logprobs(sequences, temperature=1.0, packing=packing)
            trainer.train_step(sequences, None, 1.0, packing=packing)

        manifest, whole = seconds(trainer.weight_manifest), seconds(step)
        numbers = sum(p.numel() for p in trainer.gpt.parameters())
        print(
            f"{architecture}, {numbers:,} parameters: manifest {1e3 * manifest:.1f} ms, scoring and training 32 sequences of 128 tokens "
            f"{1e3 * whole:.0f} ms: {100 * manifest / whole:.2f} %"
        )
        trainer.close()


def receive(handles, answers) -> None:
    """The other process: copies what comes into parameters of its own."""
    parameters = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in SHAPES]
    torch.cuda.synchronize()
    answers.put("up")
    while (buffer := handles.get()) is not None:
        for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters])):
            parameter.copy_(part.view(parameter.shape))
        torch.cuda.synchronize()
        del buffer
        answers.put("copied")


def on_a_gpu(results: table.Table) -> None:
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    handles, answers = context.Queue(), context.Queue()
    other = context.Process(target=receive, args=(handles, answers), daemon=True)
    other.start()
    tensors = {f"{n}": torch.randn(shape, device="cuda").bfloat16() for n, shape in enumerate(SHAPES)}
    answers.get(timeout=100)

    def transfer():
        buffer = torch.cat([t.view(-1) for t in tensors.values()])
        torch.cuda.synchronize()
        handles.put(buffer)
        answers.get(timeout=60)

    def digests():
        tensors_digest(tensors)
        torch.cuda.synchronize()

    bytes_ = sum(2 * t.numel() for t in tensors.values())
    ours, theirs = seconds(digests), seconds(transfer)
    handles.put(None)
    other.join(10)
    results.add(
        "weight manifest", "sync", f"{bytes_ / 2**30:.1f} GiB, {len(tensors)} tensors", 1e6 * ours, 1e6 * theirs,
        "bare transfer of the same bytes: joined, CUDA IPC, copied", clock="host", note="one side; a sync does more than the transfer",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--architecture", default="Qwen3_5MoeForCausalLM", help="of the CPU's model (default: %(default)s)")
    parser.add_argument("--commit", default="", help="of the measured tree, where git is not at hand")
    parser.add_argument("--out", default=table.PATH, help="table to write on a GPU (default: %(default)s)")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
        on_the_cpu(options.architecture)
        return
    table.need_gpu()
    on_a_gpu(table.Table(options.out, options.commit))


if __name__ == "__main__":
    main()
