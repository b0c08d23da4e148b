"""What the weight manifest adds to a weight sync: ``python -m bench.sync [--model FOLDER] [--commit HASH] [--out FILE]``, on a GPU host.

This process holds a policy in Megatron, another one a vLLM engine on the same GPU, both under a contract. A sync is what a training run
does with engines beside the policy: the policy's tensors are exported under their HF names, packed into one buffer as SkyRL's sender packs
them, and its CUDA IPC handle is sent; the engine loads them into its model and forgets its prefix cache. With manifests both sides digest
what they hold while the cache is flushed, and the manifests are compared. Syncs with and without them take turns. HTTP and Ray, which carry
the same calls in a training run, are not in it, nor is the handshake: they would make the manifest's share smaller.
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
from isoexec.ops._core.digest import tensors_digest

REPEATS = 15
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
    """The engine's process: loads what the handle points to, flushes, says which manifest it holds, ends at None."""
    from isoexec.runtimes.vllm.engine import RolloutEngine, replace_weights

    rollout = RolloutEngine(model, enable_prefix_caching=True)
    answers.put("up")
    while (request := requests.get()) is not None:
        if request == "manifest":
            began = time.perf_counter()
            manifest = rollout.weight_manifest().data()
            answers.put((manifest, time.perf_counter() - began))
            continue
        if request == "flush":
            rollout.reset_prefix_cache()
            answers.put("flushed")
            continue
        rebuild, arguments, names, shapes = request
        parts = rebuild(*arguments).split([shape.numel() for shape in shapes])
        replace_weights(rollout._runner, ((name, part.view(shape)) for name, part, shape in zip(names, parts, shapes)))
        del parts
        torch.cuda.synchronize()
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
        self._answer()

    def sync(self, manifests: bool) -> dict[str, float]:
        """One sync, and the seconds of its parts."""
        from torch.multiprocessing.reductions import reduce_tensor

        times = {"began": time.perf_counter()}
        tensors = self.trainer.hf_tensors()
        torch.cuda.synchronize()
        times["export"] = time.perf_counter()
        packed = torch.cat([tensor.view(-1) for tensor in tensors.values()])
        torch.cuda.synchronize()
        self._requests.put((*reduce_tensor(packed), list(tensors), [tensor.shape for tensor in tensors.values()]))
        self._answer()
        times["transfer"] = time.perf_counter()
        parts = self._flush_and_compare(times) if manifests else self._flush()
        times["flush or comparison"] = time.perf_counter()
        named = list(times.items())
        seconds = {name: t - before for (_, before), (name, t) in zip(named, named[1:])}
        return {**seconds, **parts, "whole": times["flush or comparison"] - times["began"]}

    def _flush(self) -> dict:
        self._requests.put("flush")
        self._answer()
        return {}

    def _flush_and_compare(self, times: dict[str, float]) -> dict[str, float]:
        from isoexec.runtimes.handshake import check_weights
        from isoexec.runtimes.megatron.checkpoint import manifest_of_ranks

        self._requests.put("flush")
        self._requests.put("manifest")
        pending = self.trainer.begin_weight_digests()
        times["launch of ours"] = time.perf_counter()
        ours = manifest_of_ranks(pending)
        times["rest of ours"] = time.perf_counter()
        self._answer()
        theirs, seconds = self._answer()
        times["wait for theirs"] = time.perf_counter()
        check_weights(self._contract, {"trainer": ours, "engine": theirs})
        return {"(theirs, there)": seconds}

    def check_digests(self) -> int:
        """Compares the GPU's digests with the CPU's, which have another form; returns how many tensors of 2 Mi elements or less it were.

        Raises:
            RuntimeError: two differ.
        """
        small = {name: tensor for name, tensor in self.trainer.hf_tensors().items() if tensor.numel() <= 1 << 21}
        if tensors_digest(small) != tensors_digest({name: tensor.cpu() for name, tensor in small.items()}):
            raise RuntimeError("bench.sync: the GPU's digests are not the CPU's; run tests/gpu/test_digest.py")
        return len(small)

    def close(self) -> None:
        self._requests.put(None)
        self._engine.join(20)
        self.trainer.close()

    def _answer(self):
        return self._answers.get(timeout=300)


def medians(sides: Sides) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of each part of :data:`REPEATS` syncs without and with manifests, which take turns, after one each that is not counted."""
    found = {False: [], True: []}
    for _ in range(REPEATS + 1):
        for manifests, of_kind in found.items():
            of_kind.append(sides.sync(manifests))
            print("with   " if manifests else "without", {name: f"{1e3 * t:.2f} ms" for name, t in of_kind[-1].items()}, flush=True)
    without, with_ = ({name: statistics.median(each[name] for each in kind[1:]) for name in kind[0]} for kind in found.values())
    return without, with_


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
        print(f"digests of {sides.check_digests()} tensors are those of the CPU's form", flush=True)
        tensors = sides.trainer.hf_tensors()
        count, size = len(tensors), sum(t.numel() * t.element_size() for t in tensors.values())
        del tensors
        without, with_ = medians(sides)
        sides.close()
    note = f"export {1e3 * without['export']:.1f} ms, transfer and load {1e3 * without['transfer']:.1f} ms"
    results.add(
        "weight manifest", "sync, both sides", f"{size / 2**30:.1f} GiB, {count} tensors", 1e6 * with_["whole"], 1e6 * without["whole"],
        "the same sync without it", target=1.02, clock="host", note=note,
    )  # fmt: skip


if __name__ == "__main__":
    main()
