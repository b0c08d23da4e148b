"""Qwen3.5 dense and MoE: Gated DeltaNet's state survives every way of cutting and batching sequences."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
import variants
from bitwise import same
from safetensors.torch import save_file
from variants import SOME, sample

from isoexec.contract import CONTRACT_VARIABLE, ContractError, ExecutionContract, Numerics
from isoexec.contract.manifest import differing
from isoexec.ops._core import registry
from tests.checkpoints import in_form_of, manifest_of

#: A text-only dense checkpoint, and one with experts and a vision tower beside the language model; each with a form of the core.
MODELS = (("Qwen3_5ForCausalLM", "cpr"), ("Qwen3_5MoeForConditionalGeneration", "cpr_wy"))


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model(request):
    return request.param


@pytest.fixture(scope="module")
def architecture(model):
    return model[0]


@pytest.fixture(scope="module")
def form(model):
    return model[1]


@pytest.fixture(scope="module")
def opened(architecture, form, made, open_engine):
    """``with opened(**shape) as engine``."""
    folder, contract = made(architecture, gdn_form=form)
    return lambda **shape: open_engine(folder, **({"contract": contract} | shape))


def counted(folder, form):
    """(tokens of a block, blocks) of an engine with the default arguments."""
    from isoexec.contract.build import read_config
    from isoexec.runtimes.vllm import cache_size

    return cache_size.blocks(read_config(folder), Numerics(gdn_form=form), 32, None, 64, 512, False)


class TestOneEngine:
    def test_ops_of_both_cases(self, together, form):
        served = {(op, case) for op, case, _ in registry.served()}
        assert {(f"gdn.{form}_prefill", "engine_prefill"), (f"gdn.{form}_decode", "engine_decode")} <= served
        assert {("gdn.conv1d", "engine_prefill"), ("gdn.conv1d_step", "engine_decode")} <= served
        assert all(torch.tensor(r.logprobs).isfinite().all() for r in together)

    def test_alone_and_permuted(self, engine, prompts, together):
        variants.assert_alone_and_permuted(engine, prompts, together)

    def test_prefill_rescores_what_decode_sampled(self, engine, prompts, together):
        variants.assert_prefill_rescores(engine, prompts, together)

    def test_eviction_at_every_position(self, engine, prompts, together):
        variants.assert_evicted(engine, prompts, together)

    def test_decode_across_chunks(self, engine, prompts, together):
        """40 tokens from a prompt that ends inside a chunk: two boundaries are crossed by single tokens."""
        long = sample(engine, prompts, [3, 4], tokens=40)
        params = [prompts[i] + r.tokens for i, r in zip((3, 4), long)]
        [tail] = engine.generate([params[0][:-5]], [1], 1.0, 1, record_rows=True)
        assert tail.row_digests[0] == long[0].row_digests[-5]

    def test_negative_control_and_reload(self, engine, architecture, made, tmp_path, prompts, together):
        variants.assert_reload(engine, made(architecture)[0], tmp_path, prompts, together, "layers.2.linear_attn.conv1d.weight")

    def test_parameters_of_the_decay_are_fp32(self, engine):
        names = [n for n, p in engine._runner.get_model().named_parameters() if p.dtype == torch.float32]
        assert len(names) == 6 and all(n.endswith(("linear_attn.A_log", "linear_attn.dt_bias")) for n in names)

    def test_block_size_is_what_was_counted(self, engine, architecture, form, made):
        """vLLM has not enlarged the block, and a page holds a state."""
        block, blocks = counted(made(architecture)[0], form)
        cache = engine._llm.llm_engine.vllm_config.cache_config
        assert (cache.block_size, cache.num_gpu_blocks) == (block, blocks)
        assert block % 16 == 0


#: The same language model in another form: with a vision tower beside it, or without.
OTHER_FORM = {"Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM"}


def test_both_forms_of_a_checkpoint_are_one_model(architecture, form, made, open_engine, tmp_path, prompts, together):
    """A checkpoint of the other form, with the same weights: loaded, synced and sampled in the same bits."""
    theirs, contract = made(OTHER_FORM[architecture], gdn_form=form)
    shutil.copytree(theirs, tmp_path / "same")
    save_file(in_form_of(theirs, made(architecture)[0]), tmp_path / "same" / "model.safetensors", metadata={"format": "pt"})
    with open_engine(tmp_path / "same", contract=contract) as engine:
        assert all(same(sample(engine, prompts), together))
        assert differing(manifest_of(tmp_path / "same"), engine.weight_manifest()) == []
        variants.assert_reload(engine, tmp_path / "same", tmp_path, prompts, together, "layers.2.linear_attn.conv1d.weight")
        engine.load_weights(theirs)
        assert differing(manifest_of(theirs), engine.weight_manifest()) == []
        assert not any(same(sample(engine, prompts), together)[4:])


def test_chunked_prefill(opened, prompts, together):
    """Pieces of any length, next to decoding sequences, in 4 slots that 12 sequences use in turn."""
    with opened(max_num_batched_tokens=33, max_num_seqs=4) as engine:
        assert all(same(sample(engine, prompts), together))


def test_prefix_cache_and_sync(opened, architecture, made, prompts, together):
    """States at block ends are found again; after a sync none of the old weights' is."""
    with opened(enable_prefix_caching=True) as engine:
        variants.assert_prefix_cache(engine, prompts, together, at_least=256)
        engine.load_weights(made(architecture, seed=1)[0])
        synced = sample(engine, prompts, SOME[-4:])
        assert not any(same(synced, together[-4:]))
        engine.load_weights(made(architecture)[0])
        assert all(same(sample(engine, prompts), together))


def test_a_cache_hit_moves_the_cuts_of_chunks(opened, prompts, together):
    """With a budget that is no multiple of a block, what is left of a prompt after a hit is cut elsewhere than the whole was."""
    with opened(enable_prefix_caching=True, max_num_batched_tokens=97, max_num_seqs=4) as engine:
        variants.assert_prefix_cache(engine, prompts, together, at_least=256)


def test_preemption(opened, architecture, form, made, prompts):
    """Eight blocks: two sequences of three states and one attention block each, until one of them needs a second."""
    variants.assert_preemption(opened, prompts, kv_cache_tokens=8 * counted(made(architecture)[0], form)[0])


def test_chunk_length_decides_bits(opened, architecture, form, made, prompts, together):
    """Negative control of the chunks' alignment: C = 32 is another schedule."""
    with opened(contract=made(architecture, gdn_form=form, gdn_chunk=32)[1]) as engine:
        other = sample(engine, prompts)
    equal = dict(zip(SOME, same(other, together)))
    assert not any(equal[i] for i in SOME if len(prompts[i]) > 60)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "cache_config.mamba_ssm_cache_dtype"),
        ({"mamba_cache_dtype": "float16"}, "cache_config.mamba_cache_dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_setting(opened, arguments, name):
    with pytest.raises(ContractError, match=f"{name}: expected"):
        with opened(**arguments):
            pass


def test_refused_model(made, open_engine):
    folder, contract = made("Qwen3_5ForCausalLM")
    with pytest.raises(ContractError, match="layer_scale: expected None or False, found True"):
        with open_engine(folder, contract=contract, hf_overrides={"layer_scale": True}):
            pass


def test_images_are_refused(made, open_engine):
    folder, contract = made("Qwen3_5MoeForConditionalGeneration")
    with pytest.raises(ContractError, match="language_model_only: expected True, found False"):
        with open_engine(folder, contract=contract, language_model_only=False):
            pass


def test_refused_block_size(made, monkeypatch, open_engine):
    from isoexec.runtimes.vllm.gdn import MetadataBuilder

    monkeypatch.setenv(CONTRACT_VARIABLE, made("Qwen3_5ForCausalLM")[1])
    config = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode="align"), scheduler_config=SimpleNamespace(max_num_seqs=1)
    )
    MetadataBuilder(SimpleNamespace(block_size=48), [], config, torch.device("cpu"))
    with pytest.raises(ContractError, match="block_size: expected a multiple of numerics.gdn_chunk 16, found 24"):
        MetadataBuilder(SimpleNamespace(block_size=24), [], config, torch.device("cpu"))


def test_refused_form(monkeypatch):
    """A form that the op library does not implement on the backend is refused before a model is loaded; both are implemented on both."""
    from isoexec.runtimes.vllm import gdn, settings

    text_config = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
    contracts = [ExecutionContract("Qwen3_5ForCausalLM", backend, Numerics(gdn_form="cpr")) for backend in ("cpu", "cuda")]
    for contract in contracts:
        settings._check_numerics(contract, text_config)
    monkeypatch.delitem(gdn.FORMS, "cpr")
    for contract in contracts:
        with pytest.raises(ContractError, match=f"numerics.gdn_form: expected 'cpr_wy' on {contract.backend}, found 'cpr'"):
            settings._check_numerics(contract, text_config)


def test_refused_decay_in_bf16(open_engine):
    from isoexec.runtimes.vllm.qwen3_5 import gated_delta_net

    layer = SimpleNamespace(prefix="model.layers.0.linear_attn", A_log=torch.zeros(4), dt_bias=torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ContractError, match="linear_attn.dt_bias: expected torch.float32, found torch.bfloat16"):
        gated_delta_net(layer)


def test_chunks_and_prefixes_where_upstream_takes_none(opened, monkeypatch):
    """Upstream's AMX kernels for Gated DeltaNet support neither."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    with opened(max_num_batched_tokens=100, enable_prefix_caching=True) as engine:
        config = engine._llm.llm_engine.vllm_config
        assert config.scheduler_config.enable_chunked_prefill and config.cache_config.enable_prefix_caching


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="upstream takes chunks on a CPU without AMX")
def test_upstream_refuses_a_budget_that_needs_chunks(opened):
    """Else a longer prompt would wait for ever."""
    with pytest.raises(RuntimeError, match=r"max_num_batched_tokens: expected 512 \(max_model_len\) or more, found 100: .* chunked prefill"):
        with opened(contract=None, max_num_batched_tokens=100):
            pass


def test_upstream_runs_sequences_as_short_as_a_block(opened, prompts):
    """The recipes' arm without a contract: its AMX kernels take slots of states that lie one beside the other alone."""
    with opened(contract=None, max_model_len=64) as engine:
        assert [len(r.tokens) for r in engine.generate(prompts[:3], [0, 1, 2], 1.0, 4)] == [4, 4, 4]


@pytest.mark.parametrize("amx", [True, False])
def test_a_training_run_asks_upstream_for_what_it_supports(made, architecture, tmp_path, monkeypatch, amx):
    """Upstream does not start where it finds out by itself that it has no prefix cache; a budget that needs chunks it then refuses."""
    from isoexec.runtimes.skyrl import config, server
    from tests.skyrl.small_run import small_config

    model, contract = made(architecture)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    for value in ("", contract):
        monkeypatch.setenv(CONTRACT_VARIABLE, value)
        args = server.engine_arguments(config.resolve(small_config(model, tmp_path)))
        asked = [args.enable_prefix_caching, args.enable_chunked_prefill]
        assert asked == ([False, False] if amx and not value else [True, None])  # None: vLLM's default
