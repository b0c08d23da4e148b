"""The engine and the trainer whole, with the contract and as upstream runs: ``python -m bench.stack [--model FOLDER] [--commit HASH] [--out FILE]``.

Each arm of each side is a process of its own on the same GPU, one after another. The native engine is vLLM with its defaults: compiled, in
its graphs, scheduled ahead of its results; it samples without the seeds that a contract demands. Both return each sampled token's logprob.
The native trainer is Megatron's local layers, without Transformer Engine: padded batches, attention in separate kernels. So its rows say
what the stack's own native arm costs, not what a tuned Megatron does. The default model has the sizes of Qwen3 1.7B and random weights.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import table
from isoexec.contract import CONTRACT_VARIABLE, contract_for_model

ARMS, SIDES = ("isoexec", "native"), ("engine", "trainer")
SIZES = dict(
    hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=6144,
    vocab_size=151936, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip
REPEATS = 3
BATCHES, PROMPT, NEW = (16, 256), 512, 256
#: Trainer: sequences of PROMPT + NEW tokens, and the tokens of a micro-batch.
SEQUENCES, PACK = 16, 4 * (512 + 256)


def make_model(folder: Path, **sizes) -> Path:
    """A random Qwen3 in HF format, where only its speed matters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)).bfloat16()
    model.save_pretrained(folder)
    return folder


def prompts_of(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def timed(make: Callable[[int], list], run: Callable[[list], None]) -> float:
    """Median seconds of ``run(make(seed))``, ``make`` left out, after one call that is not counted."""
    found = []
    for seed in range(REPEATS + 1):
        batch = make(seed)
        began = time.perf_counter()
        run(batch)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def engine(model: str, batches=BATCHES, prompt=PROMPT, new=NEW, **arguments) -> dict[str, float]:
    """Seconds of prefill and of decode, by batch: ``{"prefill 16x512": ...}``. The arm is the environment's."""
    from vllm import LLM, SamplingParams

    from isoexec.contract import active_contract
    from isoexec.runtimes.vllm import graphs

    contract, found = active_contract(), {}
    if contract is not None:
        arguments = {"logprobs_mode": "processed_logprobs", **graphs.arguments(max(batches)), **arguments}
    length = prompt + new + 1
    llm = LLM(
        model, dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=max(batches), max_num_batched_tokens=8192, max_model_len=length,
        enable_prefix_caching=False, gpu_memory_utilization=0.6, **arguments,
    )  # fmt: skip
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()

    def requests(count: int, tokens: int, seed: int) -> list:
        common = dict(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        seeds = [None if contract is None else seed * count + row for row in range(count)]
        prompts = prompts_of(count, prompt, vocabulary, seed)
        return [({"prompt_token_ids": each}, SamplingParams(seed=own, **common)) for each, own in zip(prompts, seeds)]

    def generate(batch: list) -> None:
        done = llm.generate(*map(list, zip(*batch)), use_tqdm=False)
        if any(len(each.outputs[0].token_ids) != params.max_tokens for each, (_, params) in zip(done, batch, strict=True)):
            raise RuntimeError("bench.stack: a sequence ended before it had its tokens")

    for count in batches:
        first, whole = (timed(functools.partial(requests, count, tokens), generate) for tokens in (1, 1 + new))
        found |= {f"prefill {count}x{prompt}": first, f"decode {count}x{new}": whole - first}
    return found


def trainer(model: str, sequences=SEQUENCES, prompt=PROMPT, new=NEW, pack=PACK) -> dict[str, float]:
    """Seconds of a scoring pass and of an optimizer step."""
    import torch
    from transformers import AutoConfig

    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    vocabulary, policy = AutoConfig.from_pretrained(model).vocab_size, PolicyTrainer(model, lr=1e-6)

    def pairs(seed: int) -> list:
        every = prompts_of(sequences, prompt + new, vocabulary, seed)
        return [(tokens[:prompt], tokens[prompt:]) for tokens in every]

    def score(batch: list) -> None:
        policy.logprobs(batch, temperature=1.0, packing=pack)

    def step(batch: list) -> None:
        policy.train_step(batch, packing=pack)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    shape = f"{sequences}x{prompt + new}"
    found = {f"score {shape}": timed(pairs, score), f"step {shape}": timed(pairs, step)}
    policy.close()
    return found


def measured(side: str, arm: str, model: str, contract: Path, work: Path) -> dict[str, float] | None:
    """What a process of this side and arm measured; None, and its own message, where it failed."""
    out = work / f"{side}-{arm}.json"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"  # the engine's process has looked for a GPU: a fork of it could use none
    environment |= {CONTRACT_VARIABLE: str(contract), "VLLM_USE_V2_MODEL_RUNNER": "0"} if arm == "isoexec" else {CONTRACT_VARIABLE: ""}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "bench.stack", "--process", side, "--model", model, "--out", str(out)], env=environment)
    print(f"{side}, {arm}: {time.perf_counter() - began:.0f} s in all, exit status {done.returncode}", flush=True)
    return json.loads(out.read_text()) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="HF-format checkpoint (default: a random one of the sizes of Qwen3 1.7B)")
    parser.add_argument("--only", choices=SIDES, help="one side")
    parser.add_argument("--process", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--commit", default="", help="of the measured tree, where git is not at hand")
    parser.add_argument("--out", default=table.PATH, help="table to write (default: %(default)s)")
    options = parser.parse_args()
    table.need_gpu()
    if options.process:
        Path(options.out).write_text(json.dumps({"engine": engine, "trainer": trainer}[options.process](options.model)))
        return
    results = table.Table(options.out, options.commit, ("vllm", "megatron-core"))
    with tempfile.TemporaryDirectory(prefix="isoexec-bench-") as folder:
        work = Path(folder)
        model = options.model or str(make_model(work / "model", **SIZES))
        contract = work / "contract.json"
        contract.write_text(contract_for_model(model, "cuda").to_json(), encoding="utf-8")
        name = Path(options.model).name if options.model else "Qwen3 1.7B, random"
        native = {"engine": "vLLM's defaults: compiled, captured, unseeded", "trainer": "Megatron's local layers, padded, no Transformer Engine"}
        failed = []
        for side in [options.only] if options.only else SIDES:
            ours, theirs = (measured(side, arm, model, contract, work) for arm in ARMS)
            failed += [f"{side}, {arm}" for arm, found in zip(ARMS, (ours, theirs)) if found is None]
            for case, seconds in (ours or {}).items():
                stage, _, shape = case.partition(" ")
                other = theirs and 1e6 * theirs[case]
                results.add(f"{side}, {name}", stage, shape, 1e6 * seconds, other, native[side], target=1.0 if side == "engine" else None, clock="host")
    if failed:
        raise SystemExit(f"bench.stack: {' and '.join(failed)} failed, see above")


if __name__ == "__main__":
    main()
