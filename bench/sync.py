"""What the weight manifest adds to a weight sync: ``python -m bench.sync [--model FOLDER] [--commit HASH] [--out FILE]``, on a GPU host.

This process holds a policy in Megatron, another one a vLLM engine on the same GPU, both under a contract. A sync is what a training run
does with engines beside the policy: the policy's tensors are exported under their HF names and brought to the GPU, packed into one buffer
as SkyRL's sender packs them, and its CUDA IPC handle is sent; the engine loads them into its model and forgets its prefix cache. Then each
side makes its manifest, one after the other, and they are compared. HTTP and Ray, which carry the same calls in a training run, are not in
it: they would make the manifest's share smaller.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench import table
from isoexec.contract import CONTRACT_VARIABLE, ExecutionContract, contract_for_model

REPEATS = 5
#: A dense model of 1.3 GiB.
SIZES = dict(
    hidden_size=2048,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    vocab_size=32768,
)


def engine(model: str, requests, answers) -> None:
    """The engine's process: loads what the handle points to, says which manifest it holds, ends at None."""
    from isoexec.runtimes.vllm.engine import RolloutEngine, replace_weights

    rollout = RolloutEngine(model, enable_prefix_caching=True)
    answers.put("up")
    while (request := requests.get()) is not None:
        if request == "manifest":
            answers.put(rollout.weight_manifest().data())
            continue
        rebuild, arguments, names, shapes = request
        parts = rebuild(*arguments).split([shape.numel() for shape in shapes])
        replace_weights(rollout._runner, ((name, part.view(shape)) for name, part, shape in zip(names, parts, shapes)))
        del parts
        torch.cuda.synchronize()
        rollout.reset_prefix_cache()
        answers.put("loaded")
    rollout.close()


class Sides:
    """A policy here and an engine there."""

    def __init__(self, model: str, contract: ExecutionContract):
        import torch.multiprocessing as processes

        from isoexec.runtimes.megatron.trainer import PolicyTrainer

        context = processes.get_context("spawn")
        self._requests, self._answers = context.Queue(), context.Queue()
        self._engine = context.Process(target=engine, args=(model, self._requests, self._answers), daemon=True)
        self._engine.start()
        self.trainer, self._contract = PolicyTrainer(model), contract
        self._answers.get(timeout=300)

    def export(self) -> dict[str, torch.Tensor]:
        """The policy's tensors on the GPU."""
        return {name: tensor.to("cuda") for name, tensor in self.trainer._hf_tensors(torch.Tensor.detach).items()}

    def transfer(self, tensors: dict[str, torch.Tensor]) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        packed = torch.cat([tensor.view(-1) for tensor in tensors.values()])
        torch.cuda.synchronize()
        self._requests.put((*reduce_tensor(packed), list(tensors), [tensor.shape for tensor in tensors.values()]))
        self._answers.get(timeout=100)

    def manifests(self) -> None:
        from isoexec.runtimes.handshake import check_weights

        ours = self.trainer.weight_manifest()
        self._requests.put("manifest")
        check_weights(self._contract, {"trainer": ours, "engine": self._answers.get(timeout=100)})

    def close(self) -> None:
        self._requests.put(None)
        self._engine.join(20)
        self.trainer.close()


def seconds(sides: Sides) -> list[dict[str, float]]:
    """Seconds of each part, for :data:`REPEATS` syncs after one that is not counted."""
    found = []
    for _ in range(REPEATS + 1):
        times = [time.perf_counter()]
        tensors = sides.export()
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        sides.transfer(tensors)
        times.append(time.perf_counter())
        del tensors
        sides.manifests()
        times.append(time.perf_counter())
        found.append(dict(zip(("export", "transfer", "manifest"), (b - a for a, b in zip(times, times[1:])))))
        print({name: f"{1e3 * t:.1f} ms" for name, t in found[-1].items()}, flush=True)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="HF-format checkpoint (default: a dense one of 1.3 GiB is made)")
    parser.add_argument("--commit", default="", help="of the measured tree, where git is not at hand")
    parser.add_argument("--out", default=table.PATH, help="table to write (default: %(default)s)")
    options = parser.parse_args()
    table.need_gpu()
    results = table.Table(options.out, options.commit, ("vllm", "megatron-core"))
    with tempfile.TemporaryDirectory(prefix="isoexec-bench-") as work:
        model = options.model
        if model is None:
            from isoexec.verify.checkpoint import make_checkpoint

            model = str(make_checkpoint(Path(work) / "model", **SIZES))
        contract = contract_for_model(model, "cuda")
        file = Path(work) / "contract.json"
        file.write_text(contract.to_json(), encoding="utf-8")
        os.environ[CONTRACT_VARIABLE] = str(file)
        sides = Sides(model, contract)
        size = sum(t.numel() * t.element_size() for t in sides.trainer.gpt.parameters())
        found = seconds(sides)
        medians = {name: statistics.median(times[name] for times in found) for name in found[0]}
        sides.close()
    sync = medians["export"] + medians["transfer"]
    note = f"export {1e3 * medians['export']:.0f} ms, transfer and load {1e3 * medians['transfer']:.0f} ms"
    results.add(
        "weight manifest", "sync, both sides", f"{size / 2**30:.1f} GiB", 1e6 * (sync + medians["manifest"]), 1e6 * sync,
        "the same sync without it", target=1.02, clock="host", note=note,
    )  # fmt: skip


if __name__ == "__main__":
    main()
