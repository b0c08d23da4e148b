"""Settings and requests outside the contract are refused by name, and the engine lives on after a refused request."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from bitwise import same

from isoexec.contract import Claims, ContractError, ExecutionContract, Numerics
from isoexec.contract.checkpoints import COVERED
from isoexec.runtimes.vllm import settings


class Overlay:
    """A configuration with another value at a dotted path; everything else is read through."""

    def __init__(self, base, path):
        self._base, (self._name, _, self._rest) = base, path.partition(".")

    def __getattr__(self, name):
        inner = self._base.get(name) if isinstance(self._base, dict) else getattr(self._base, name, None)
        if name != self._name:
            return inner
        return Overlay(inner, self._rest) if self._rest else "something else"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "model_config.logprobs_mode"),
        ({"enforce_eager": False}, "model_config.enforce_eager"),
        ({"dtype": "float32"}, "model_config.dtype"),
        ({"kv_cache_dtype": "fp8"}, "cache_config.cache_dtype"),
        ({"enable_lora": True}, "lora_config"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}, "speculative_config"),
        ({"pipeline_parallel_size": 2}, "parallel_config.pipeline_parallel_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_engine_setting(open_engine, checkpoint, arguments, name):
    with pytest.raises(ContractError, match=rf"{name}: expected .*, found .*set it to"):
        with open_engine(checkpoint, **arguments):
            pass


def test_ranks_of_an_engine():
    """What they share out is whole, and claimed."""

    def check(degree, expert_parallel=False, claims=Claims(engine_tp=8, engine_ep=8), experts=None, **sizes):
        text = SimpleNamespace(**{"num_hidden_layers": 4, "num_key_value_heads": 8, "num_experts": experts, **sizes})
        contract = ExecutionContract("Qwen3ForCausalLM", "cpu", Numerics(), claims)
        settings._check_ranks(contract, SimpleNamespace(tensor_parallel_size=degree, enable_expert_parallel=expert_parallel), text)

    for degree in (1, 2, 4, 8):
        check(degree)
        check(degree, degree > 1, experts=16)
    for arguments, message in (
        (dict(degree=2, claims=Claims()), r"tensor_model_parallel_size: the contract claims at most 1 \(claims.engine_tp\), found 2"),
        (dict(degree=4, expert_parallel=True, experts=16, claims=Claims(engine_tp=4)), r"at most 1 \(claims.engine_ep\), found 4"),
        (dict(degree=2, experts=16), "enable_expert_parallel: expected True with tensor_parallel_size 2 and 16 experts, found False"),
        (dict(degree=1, expert_parallel=True, experts=16), "enable_expert_parallel: expected False .*, found True"),
        (dict(degree=2, expert_parallel=True), "enable_expert_parallel: expected False .* and no experts, found True"),
        (dict(degree=4, num_key_value_heads=2), "tensor_model_parallel_size: expected a divisor of the 2 key/value heads, found 4"),
        (dict(degree=4, linear_num_key_heads=2), "expected a divisor of the 2 key heads of Gated DeltaNet, found 4"),
        (dict(degree=3), "tensor_model_parallel_size: expected a divisor of numerics.row_leaves 8, found 3"),
        (dict(degree=2, expert_parallel=True, experts=12), "expert_model_parallel_size: expected a divisor of numerics.combine_groups 8"),
    ):
        with pytest.raises(ContractError, match=message):
            check(**arguments)


@pytest.mark.parametrize("architecture", ("Qwen3ForCausalLM", "Qwen3_5MoeForCausalLM", "Glm4MoeLiteForCausalLM"))
def test_captured_steps(architecture):
    """On a GPU decode steps of every architecture may be captured, whole and not compiled; on a CPU none."""

    def check(backend="cuda", mode="NONE", cudagraph_mode="FULL_DECODE_ONLY"):
        graphs = SimpleNamespace(mode=SimpleNamespace(name=mode), cudagraph_mode=SimpleNamespace(name=cudagraph_mode))
        config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False), compilation_config=graphs)
        settings._check_graphs(ExecutionContract(architecture, backend, Numerics()), config)

    check()
    for change, name in (
        ({"backend": "cpu"}, "model_config.enforce_eager"),
        ({"mode": "VLLM_COMPILE"}, "compilation_config.mode.name"),
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, "compilation_config.cudagraph_mode.name"),
    ):
        with pytest.raises(ContractError, match=f"{name}: expected .*, found"):
            check(**change)


@pytest.mark.parametrize(
    ("eager", "sequences", "sizes"), [(False, 24, [1, 2, 4, 8, 16, 24]), (False, 1024, [1 << n for n in range(10)]), (True, 24, None)]
)
def test_a_training_run_s_engine_on_a_gpu(made, tmp_path, monkeypatch, eager, sequences, sizes):
    """The recipes' engine captures decode steps in the form that the contract allows; vLLM's own arguments take it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from isoexec.contract import CONTRACT_VARIABLE
    from isoexec.runtimes.skyrl import config, server
    from tests.skyrl.small_run import small_config

    for module in (config, server):
        monkeypatch.setattr(module, "uses_gpus", lambda: True)
    model, contract = made("Qwen3ForCausalLM")
    monkeypatch.setenv(CONTRACT_VARIABLE, contract)
    changes = [f"enforce_eager={str(eager).lower()}", f"max_num_seqs={sequences}"]
    run = config.resolve(small_config(model, tmp_path, [f"generator.inference_engine.{change}" for change in changes]))
    args = AsyncEngineArgs.from_cli_args(server.engine_arguments(run))
    assert args.enforce_eager == eager
    if not eager:
        graphs = args.compilation_config
        assert graphs.cudagraph_capture_sizes == sizes
        found = SimpleNamespace(model_config=args, compilation_config=graphs)
        settings._check_graphs(ExecutionContract("Qwen3ForCausalLM", "cuda", Numerics()), found)


@pytest.mark.parametrize(
    ("entries", "name"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, "rope_parameters.rope_type"),
        ({"attention_bias": True}, "attention_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_of_another_function(open_engine, checkpoint, entries, name):
    """The entries that vLLM reads, whatever the file says."""
    with pytest.raises(ContractError, match=rf"{name}: expected .*, found .*this checkpoint computes another function"):
        with open_engine(checkpoint, hf_overrides=entries):
            pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "cuda"}, "backend: the contract names 'cuda', this engine computes on 'cpu'"),
        ({"architecture": "LlamaForCausalLM"}, "architecture: the vLLM runtime runs Qwen3ForCausalLM"),
        ({"architecture": "Qwen3MoeForCausalLM"}, "the contract names Qwen3MoeForCausalLM, the checkpoint .*Qwen3ForCausalLM"),
    ],
)
def test_contract_of_another_model_or_backend(open_engine, checkpoint, contract_file, tmp_path, change, message):
    contract = ExecutionContract.from_json(open(contract_file, encoding="utf-8").read())
    other = tmp_path / "other.json"
    other.write_text(dataclasses.replace(contract, **change).to_json())
    with pytest.raises(ContractError, match=message):
        with open_engine(checkpoint, contract=str(other)):
            pass


def test_checkpoint_of_another_architecture(open_engine, checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "Qwen2ForCausalLM"))
    with pytest.raises(ContractError, match="the contract names Qwen3ForCausalLM, the checkpoint .*Qwen2ForCausalLM"):
        with open_engine(tmp_path):
            pass


REQUESTS = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "min_tokens": {"min_tokens": 2},
    "logit_bias": {"logit_bias": {3: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": [1, 2]},
    "bad_words": {"bad_words": ["x"]},
    "seed": {"seed": None},
    "temperature": {"temperature": 0.0, "logprobs": 4},  # what beam search sends, too
    "prompt_logprobs": {"temperature": 0.7, "prompt_logprobs": 0},
}


class TestOneEngine:
    @pytest.mark.parametrize("setting", settings.ENGINE, ids=lambda setting: setting.path)
    def test_every_row_of_the_engine_table(self, engine, contract_file, setting):
        contract = ExecutionContract.from_json(open(contract_file, encoding="utf-8").read())
        config = engine._llm.llm_engine.vllm_config
        settings.check(contract, config)
        with pytest.raises(ContractError, match=f"^{setting.path}: expected .*, found 'something else'"):
            settings.check(contract, Overlay(config, setting.path))

    @pytest.mark.parametrize("setting", COVERED["Qwen3ForCausalLM"], ids=lambda setting: setting.path)
    def test_every_row_of_the_architecture_table(self, engine, contract_file, setting):
        contract = ExecutionContract.from_json(open(contract_file, encoding="utf-8").read())
        config = engine._llm.llm_engine.vllm_config
        with pytest.raises(ContractError, match=f"^{setting.path}: expected .*, found 'something else'"):
            settings.check(contract, Overlay(config, f"model_config.hf_text_config.{setting.path}"))

    @pytest.mark.parametrize("name", REQUESTS)
    def test_request(self, engine, prompts, name):
        from vllm import SamplingParams

        common = {"seed": 1, "max_tokens": 4, "temperature": 1.0, "detokenize": False}
        good, bad = SamplingParams(**common), SamplingParams(**(common | REQUESTS[name]))
        with pytest.raises(ContractError, match=rf"^{name}: expected"):
            engine.request(prompts[:2], [good, bad])
        assert not engine._llm.llm_engine.has_unfinished_requests()

    def test_structured_output(self, engine, prompts):
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(regex="a+"), detokenize=False)
        with pytest.raises(ContractError, match="^structured_outputs: expected None"):
            engine.request(prompts[:1], [params])

    def test_the_engine_lives_on(self, engine, prompts):
        """After every refusal above: the same bits as before, and greedy sampling without logprobs is served."""
        from vllm import SamplingParams

        first = engine.generate(prompts[:3], [1, 2, 3], 1.0, 4, record_rows=True)
        with pytest.raises(ContractError):
            engine.request(prompts[:1], [SamplingParams(top_p=0.5)])
        assert all(same(first, engine.generate(prompts[:3], [1, 2, 3], 1.0, 4, record_rows=True)))

        greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)
        drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=5, ignore_eos=True, detokenize=False, logprobs=0)
        alone = [engine.request([prompts[i]], [p])[0].outputs[0] for i, p in ((7, greedy), (11, drawn))]
        mixed = [o.outputs[0] for o in engine.request([prompts[7], prompts[11]], [greedy, drawn])]
        assert [list(o.token_ids) for o in alone] == [list(o.token_ids) for o in mixed]
        assert mixed[0].logprobs is None
        one = SamplingParams(temperature=1.0, seed=0, max_tokens=1, logprobs=1, detokenize=False)
        best = engine.request([prompts[7]], [one])[0].outputs[0].logprobs[0]
        assert max(best, key=lambda token: best[token].logprob) == mixed[0].token_ids[0]
