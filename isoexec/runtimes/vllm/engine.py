"""In-process rollout engine: vLLM's ``LLM`` as the verification and the tests drive it, with or without a contract."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from isoexec.contract import ContractError, Identity, Numerics, active_contract
from isoexec.contract.architectures import has_experts
from isoexec.contract.build import read_config
from isoexec.contract.manifest import Manifest
from isoexec.ops._core import registry
from isoexec.runtimes.handshake import process_identity
from isoexec.runtimes.vllm import cache_size, rows

#: Environment of an in-process engine, set before vLLM is imported. No entry changes a bit under a contract.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process, so that weights and counters are at hand
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "TORCHDYNAMO_DISABLE": "1",  # a rank counter of the sampler is torch.compile'd even with enforce_eager; 45 s to compile
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def prepare_environment() -> None:
    """Set :data:`ENVIRONMENT` where the caller has not."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence.

    Attributes:
        prompt: token ids sent.
        tokens: token ids sampled.
        logprobs: of each sampled token under the distribution it was drawn from; floats that are fp32 exactly.
        row_digests: digest of the whole vocabulary's fp32 log-probability row at each sampled token, or None.
        num_cached_tokens: prompt tokens served by the prefix cache.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    row_digests: list[str] | None
    num_cached_tokens: int


class RolloutEngine:
    """vLLM on one HF-format checkpoint. The contract, or its absence, is read from the environment when the engine is built.

    A process holds one engine at a time, since closing one takes down vLLM's process groups: close it before building the next.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = False,
        max_model_len: int = 512,
        kv_cache_tokens: int | None = None,
        block_size: int = 32,
        cuda_graphs: bool = False,
        tensor_parallel: int = 1,
        **engine_args,
    ):
        """
        Args:
            model: folder of the checkpoint.
            max_num_seqs: sequences in one step at most.
            max_num_batched_tokens: tokens in one step at most; longer prompts are prefilled in chunks.
            enable_prefix_caching: reuse the cache blocks of equal prefixes.
            max_model_len: tokens of a sequence at most.
            kv_cache_tokens: size of the KV cache, a multiple of ``block_size``; None holds every sequence at full length, less makes
                the scheduler preempt. In a hybrid, the state of a sequence in a group of Gated DeltaNet layers takes a block of it.
            block_size: tokens of a cache block; a hybrid's is the least multiple that holds a state.
            cuda_graphs: capture decode steps, on a GPU.
            tensor_parallel: ranks that share out heads, channels and whole experts. Each is a process that builds this engine and makes the
                same calls, and gets the same answers; RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in it.
            engine_args: further arguments of ``vllm.LLM``.

        Raises:
            ContractError: a setting is outside the contract.
            RuntimeError: another engine is open, or vLLM does not support a setting on this machine.
        """
        prepare_environment()
        from vllm import LLM
        from vllm.distributed.parallel_state import model_parallel_is_initialized
        from vllm.platforms import current_platform

        if model_parallel_is_initialized():
            raise RuntimeError("this process already holds an engine; close it before building another")
        if current_platform.is_cpu():
            os.environ.setdefault("VLLM_MLA_DISABLE", "1")  # upstream has no latent attention there, but its per-head form
        else:  # a share that must be free at the start, where the blocks are counted below: others may have the rest
            engine_args = {"gpu_memory_utilization": 0.05, **engine_args}
        config = read_config(model)
        register_model(config)
        contract = active_contract()
        numerics = Numerics() if contract is None else contract.numerics
        block_size, blocks = cache_size.blocks(
            config, numerics, block_size, kv_cache_tokens, max_num_seqs, max_model_len, enable_prefix_caching
        )
        if config["architectures"][0].endswith("ForConditionalGeneration"):
            engine_args = {"language_model_only": True, **engine_args}
        if "linear_attention" in config.get("text_config", config).get("layer_types", ()):
            engine_args = {"mamba_ssm_cache_dtype": "float32", **engine_args}  # upstream's CPU kernel takes no other
        if tensor_parallel > 1:
            engine_args = {
                "tensor_parallel_size": tensor_parallel,
                "enable_expert_parallel": has_experts(config["architectures"][0]),
                "distributed_executor_backend": "external_launcher",
                **engine_args,
            }
        if cuda_graphs:
            from isoexec.runtimes.vllm import graphs

            engine_args = {**graphs.arguments(max_num_seqs), **engine_args}
        self._captured_for, self._captures = None, cuda_graphs
        self._llm = LLM(
            **{
                "model": str(model),
                "dtype": "bfloat16",
                "enforce_eager": True,
                "logprobs_mode": "processed_logprobs",
                "max_logprobs": -1,
                "skip_tokenizer_init": True,
                "disable_log_stats": False,
                "async_scheduling": False,  # evictions, and the rows of a recording, are told by finished steps
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "enable_prefix_caching": enable_prefix_caching,
                "max_model_len": max_model_len,
                "block_size": block_size,
                "num_gpu_blocks_override": blocks,
                "kv_cache_memory_bytes": 1 << 30,  # only checked against the machine's memory: the override decides
                **engine_args,
            }
        )
        self._check_chunks(max_num_batched_tokens, max_model_len)
        self._preemptions_before = self._counter("vllm:num_preemptions")
        self._folder, self._contract, self._syncs = model, contract, 0
        self._observer, self._first_observed = None, 0

    def _check_chunks(self, budget: int, max_model_len: int) -> None:
        """Upstream turns chunked prefill off where its own kernels do not support it, and says so in its log alone."""
        if budget < max_model_len and not self._llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill:
            self.close()
            raise RuntimeError(
                f"max_num_batched_tokens: expected {max_model_len} (max_model_len) or more, found {budget}: vLLM's kernels for this model and "
                "machine do not support chunked prefill, and without it a longer prompt waits for ever"
            )

    def generate(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        temperature: float,
        max_tokens: int,
        record_rows: bool = False,
        evict_at: Sequence[int] = (),
    ) -> list[Rollout]:
        """Sample one sequence of ``max_tokens`` tokens per prompt; end-of-sequence tokens do not stop it.

        Args:
            prompts: token ids, submitted in this order.
            seeds: one per prompt.
            temperature: more than 0.
            max_tokens: tokens to sample for each prompt.
            record_rows: fill :attr:`Rollout.row_digests`.
            evict_at: numbers of engine steps, counted from 1, ascending; after each, every running sequence is evicted, to be recomputed.

        Returns:
            One rollout per prompt, in the order of ``prompts``.
        """
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=-1 if record_rows else 0,
                flat_logprobs=True,
            )
            for seed in seeds
        ]
        vocab_size = self._llm.llm_engine.vllm_config.model_config.get_vocab_size()
        with rows.carried_digests(self._runner.sampler, vocab_size) if record_rows else contextlib.nullcontext():
            outputs = self.request(prompts, params, evict_at)
        return [_rollout(prompt, output, record_rows) for prompt, output in zip(prompts, outputs, strict=True)]

    def request(self, prompts: list[list[int]], params: list, evict_at: Sequence[int] = ()) -> list:
        """vLLM ``RequestOutput`` of each prompt under its own ``SamplingParams``, in the order of ``prompts``.

        An observer of the ops (:func:`isoexec.ops._core.registry.observing`) is told which tokens they compute; its sequences are the
        prompts that it has seen, counted from 0. ``evict_at`` is as in :meth:`generate`.

        Raises:
            ContractError: a request is outside the contract; none of them is run.
        """
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts, {len(params)} sampling parameters; pass one for each")
        # The salt enters the key of every cached block: one that other weights computed cannot be hit, whoever cached it, and when.
        salt = {} if self._contract is None else {"cache_salt": f"weights {self._syncs}"}
        inputs = [{"prompt_token_ids": prompt, **salt} for prompt in prompts]
        observer = registry.current_observer()
        with self._graphs_for(observer):
            if observer is None:
                return self._run(inputs, params, evict_at)
            from isoexec.runtimes.vllm import step
            from isoexec.runtimes.vllm.step_rows import StepRows

            if observer is not self._observer:
                self._observer, self._first_observed = observer, self._llm.request_counter.counter
            with step.observed(StepRows(self._runner, self._first_observed)):
                return self._run(inputs, params, evict_at)

    def _graphs_for(self, observer):
        """Context in which this engine's graphs, if it has any, record for ``observer``; without them where a replay cannot tell it."""
        if not self._captures:
            return contextlib.nullcontext()
        from isoexec.runtimes.vllm import graphs

        if observer is not None and not observer.can_capture:
            return graphs.eager(self._runner)
        if observer is not self._captured_for:
            graphs.recapture(self._runner)
            self._captured_for = observer
        return contextlib.nullcontext()

    def _run(self, inputs: list[dict], params: list, evict_at: Sequence[int]) -> list:
        self._llm.enqueue(inputs, params, use_tqdm=False)
        engine, finished, steps = self._llm.llm_engine, [], 0
        for last in evict_at:
            while steps < last and engine.has_unfinished_requests():
                finished += [output for output in engine.step() if output.finished]
                steps += 1
            engine.reset_prefix_cache(reset_running_requests=True)
        finished += self._llm.wait_for_completion(use_tqdm=False)
        return sorted(finished, key=lambda output: int(output.request_id))

    def identity(self) -> Identity:
        """What this process runs, as evidence, for the handshake.

        Raises:
            ContractError: no contract is active, or the installation is not the contract's.
        """
        return process_identity("engine", self._folder)

    def weight_manifest(self) -> Manifest:
        """Digest of every logical tensor that the engine holds now, by HF name.

        Raises:
            ContractError: a parameter or buffer has no HF name.
        """
        from isoexec.runtimes.vllm import weights

        return weights.manifest(self._runner.get_model())

    @property
    def num_preemptions(self) -> int:
        """Sequences that the scheduler has evicted to recompute later, since the engine was built (vLLM's own counter)."""
        return self._counter("vllm:num_preemptions") - self._preemptions_before

    @property
    def block_size(self) -> int:
        """Tokens of a cache block, the least that a prefix cache holds."""
        return self._llm.llm_engine.vllm_config.cache_config.block_size

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix.

        Raises:
            RuntimeError: vLLM refused, since sequences are running.
        """
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset the prefix cache; wait until no sequence is running")

    @property
    def num_replays(self) -> int:
        """Decode steps of this process that were replays of CUDA graphs."""
        from isoexec.runtimes.vllm import graphs

        return sum(graphs.replays().values())

    def load_weights(self, path: str | os.PathLike) -> None:
        """Replace the model's parameters in place and forget every cached prefix, which the old ones computed.

        Args:
            path: ``.safetensors`` file or a folder of them, under HF names; every parameter of the model must be there.

        Raises:
            ContractError: sequences are running: theirs would be sampled by two policies, and no trainer could score them.
            ValueError: a parameter is missing.
        """
        from safetensors import safe_open

        if self._contract is not None and self._llm.llm_engine.has_unfinished_requests():
            raise ContractError("weights: expected no running sequence at a sync, found some; finish or abort them first")
        self._syncs += 1

        path = Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]

        def tensors():
            for file in files:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():
                        yield name, opened.get_tensor(name)

        replace_weights(self._runner, tensors())
        self.reset_prefix_cache()

    def fill_kv_cache(self, value: float) -> None:
        """Overwrite the whole KV cache and every state, e.g. with NaN, so that reading what no token wrote shows.

        No sequence may be running.
        """
        for cache in self._runner.kv_caches:
            for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
                tensor.fill_(value if tensor.is_floating_point() else -1)

    def close(self) -> None:
        """Free the engine; the process can build another."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()

    @property
    def _runner(self):
        return self._llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def _counter(self, name: str) -> int:
        return sum(metric.value for metric in self._llm.get_metrics() if metric.name == name)


def replace_weights(runner, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace the parameters of a vLLM model runner's model in place. What the caches hold was computed by the old ones: forget it.

    Args:
        runner: vLLM model runner.
        tensors: (HF name, tensor) of every parameter of the model.

    Raises:
        ContractError: a parameter has moved: captured steps would go on with the old values.
        ValueError: a parameter is missing.
    """
    if active_contract() is None:
        # Upstream's CPU linears have packed and dropped their parameters; only its own reload can refill them.
        runner.reload_weights(weights_iterator=tensors)
        return
    model = runner.get_model()
    missing = {name for name, _ in model.named_parameters()} - load_in_place(model, tensors)
    if missing:
        raise ValueError(f"weights: no values for {sorted(missing)}; the model now mixes old and new ones: load a whole checkpoint")


def load_in_place(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Load new values into some of a vLLM model's parameters; the names of those that were.

    Args:
        model: the model of a vLLM model runner.
        tensors: (HF name, tensor).

    Raises:
        ContractError: a parameter has moved: captured steps would go on with the old values.
    """
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    loaded = model.load_weights(tensors)
    moved = [name for name, parameter in model.named_parameters() if parameter.data_ptr() != places.get(name)]
    if moved:
        raise ContractError(
            f"weights: {moved[0]}: expected its new values where the old ones lay, found them elsewhere (so are {len(moved)} of "
            f"{len(places)}): captured steps read the old ones; let the layer's loader copy into its parameter"
        )
    return loaded


def register_model(config: dict) -> None:
    """Hand vLLM the model class itself.

    vLLM inspects a class that it knows by name only in a subprocess, so that CUDA is not initialised here; that imports
    everything anew, 20 to 40 s on a small machine. A class that is already imported is inspected in place.
    """
    from vllm import ModelRegistry

    for architecture in config["architectures"]:
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _rollout(prompt: list[int], output, with_digests: bool) -> Rollout:
    completion = output.outputs[0]
    tokens, flat = list(completion.token_ids), completion.logprobs
    # The sampled token comes first at each position; the digest of the row follows, if it was asked for.
    logprobs = [flat.logprobs[start] for start in flat.start_indices]
    digests = None
    if with_digests:
        words = (flat.token_ids[start + 1 : end] for start, end in zip(flat.start_indices, flat.end_indices, strict=True))
        digests = [rows.from_words(each) for each in words]
    return Rollout(list(prompt), tokens, logprobs, digests, output.num_cached_tokens or 0)
