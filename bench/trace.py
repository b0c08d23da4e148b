"""What recording costs: the same sampling and scoring without a recorder and at each level, taken in turns.

    python bench/trace.py [ARCHITECTURE] [--hidden N] [--prompts N] [--tokens N] [--repeats N]

Prints seconds (the median of the repeats) and the ratio to a run without a recorder. The time includes the file that is written. ``off``
is measured twice: the ratio of the second says how far two equal runs differ here.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from isoexec.contract import contract_for_model
from isoexec.verify.prompts import make_prompts, packings, request_seeds
from isoexec.verify.protocol import WorkerGroup
from isoexec.verify.run import worker_environment

TIMEOUT = 600
LEVELS = ("off", "off again", "layers", "ops", "state")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("architecture", nargs="?", default="Qwen3ForCausalLM")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size; heads and MLP grow with it (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isoexec-bench-") as work, WorkerGroup(Path(work)) as group:
        measure(options, Path(work), group)


def measure(options, work: Path, group: WorkerGroup) -> None:
    from isoexec.verify.checkpoint import make_checkpoint

    model, contract = work / "model", work / "contract.json"
    sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers, "num_attention_heads": options.hidden // 64,
             "num_key_value_heads": max(options.hidden // 256, 1), "head_dim": 64}  # fmt: skip
    if "Moe" not in options.architecture:
        sizes["intermediate_size"] = 3 * options.hidden
    make_checkpoint(model, options.architecture, **sizes)
    contract.write_text(contract_for_model(str(model), "cpu").to_json())
    engine, trainer = (group.start(name, f"isoexec.verify.{name}_worker", worker_environment(contract)) for name in ("engine", "trainer"))
    shape = dict(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=512)
    engine.call("open", TIMEOUT, model=str(model), contract=str(contract), shape=shape)
    trainer.call("open", TIMEOUT, model=str(model), contract=str(contract), learning_rate=1e-3)
    prompts = make_prompts(options.prompts, 512, seed=20)
    seeds = request_seeds(prompts, seed=21)
    seconds: dict[tuple[str, str], list[float]] = {}
    for repeat in range(options.repeats + 1):  # the first one warms up
        for level in LEVELS:
            trace = None if level.startswith("off") else {"file": str(work / "trace.zip"), "level": level}
            began = time.perf_counter()
            rollouts = engine.call("generate", TIMEOUT, prompts=prompts, seeds=seeds, temperature=1.0, max_tokens=options.tokens,
                                   one_at_a_time=False, rows=False, trace=trace)["rollouts"]  # fmt: skip
            sampled = time.perf_counter()
            pairs = [[p, r["tokens"]] for p, r in zip(prompts, rollouts)]
            packing = packings([len(p) + len(t) for p, t in pairs], tokens=1024, seed=1)
            trainer.call(
                "score", TIMEOUT, sequences=pairs, temperature=1.0, packing=packing, grad=False, recompute=False, rows=False, trace=trace
            )
            scored = time.perf_counter()
            if repeat:
                seconds.setdefault(("engine", level), []).append(sampled - began)
                seconds.setdefault(("trainer", level), []).append(scored - sampled)
    print(
        f"{options.architecture}, hidden {options.hidden}, {options.layers} layers, {options.prompts} prompts, {options.tokens} new tokens"
    )
    for side in ("engine", "trainer"):
        base = statistics.median(seconds[side, "off"])
        for level in LEVELS:
            found = seconds[side, level]
            print(
                f"{side:8} {level:10} {statistics.median(found):7.3f} s  {statistics.median(found) / base:5.2f}  (least {min(found):.3f} s)"
            )


if __name__ == "__main__":
    main()
