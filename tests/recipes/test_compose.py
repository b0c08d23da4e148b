"""Recipes compose to a configuration that SkyRL and the run accept, and bad input is one line."""

import shutil

import pytest
from omegaconf import OmegaConf

from isoexec.contract import ContractError
from isoexec.runtimes.skyrl.config import TrainConfig
from isoexec.train.check import prepare
from isoexec.train.compose import RECIPES, as_yaml, compose, recipe_names
from isoexec.train.section import recipe_section


def test_every_recipe_is_one_that_skyrl_takes(composed):
    from skyrl.train.utils import validate_cfg

    assert recipe_names() == ["gpu", "node", "nodes", "tiny", "tiny-dense"]
    for name in recipe_names():
        config = composed(name, "trainer.policy.model.path=/somewhere")
        section = recipe_section(OmegaConf.to_container(config.pop("recipe")))
        assert section.name == name and section.folder == str(RECIPES)
        typed = TrainConfig.from_dict_config(config)
        validate_cfg(typed)
        assert typed.generator.inference_engine.num_engines == 8 * section.nodes or section.nodes == 1


def test_dapo_is_complete(composed):
    for name in recipe_names():
        config = composed(name, "trainer.policy.model.path=/somewhere")
        algorithm, sampling = config.trainer.algorithm, config.generator.sampling_params
        assert algorithm.eps_clip_high > algorithm.eps_clip_low
        assert algorithm.dynamic_sampling.type == "filter"
        assert algorithm.loss_reduction == "token_mean"
        assert 0 < algorithm.overlong_buffer_len < sampling.max_generate_length and algorithm.overlong_buffer_penalty_factor == 1
        assert algorithm.advantage_estimator == "grpo" and algorithm.grpo_norm_by_std
        assert not algorithm.use_kl_loss and not algorithm.use_kl_in_reward
        assert (sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, -1, 1)


def test_groups_and_any_key_can_be_overridden(composed):
    config = composed("tiny", "model=tiny-dense", "trainer.policy.megatron_config.mtp_loss_weight=0.5", "recipe.task.config.max_terms=4")
    assert config.trainer.policy.model.path.endswith("start/dense")
    assert config.trainer.policy.megatron_config.mtp_loss_weight == 0.5
    assert config.recipe.task.config.max_terms == 4
    assert composed("nodes", "recipe.nodes=4").generator.inference_engine.num_engines == 32
    small = composed("nodes", "hardware=cpu-nodes", "recipe.nodes=3")
    assert small.recipe.backend == "cpu" and small.generator.inference_engine.num_engines == 3 == small.trainer.placement.policy_num_nodes


def test_what_is_derived_follows_an_override(composed):
    """Composition must not freeze what SkyRL derives from other entries."""
    config = composed("tiny", "generator.sampling_params.temperature=0.7", "trainer.max_prompt_length=40")
    del config["recipe"]
    typed = TrainConfig.from_dict_config(config)
    assert typed.trainer.algorithm.temperature == 0.7 and typed.generator.max_input_length == 40
    assert typed.trainer.ref.model.path == typed.trainer.policy.model.path


def test_printing_shows_every_key_and_reads_back(composed):
    config = composed("tiny")
    text = as_yaml(config)
    assert OmegaConf.create(text) == config
    assert "${" not in text and "clip_cov_lb" in text


@pytest.mark.parametrize(
    "recipe, override, message",
    [
        ("tinny", None, "recipe 'tinny' is unknown; there are gpu, node, nodes, tiny, tiny-dense"),
        ("base/isoexec", None, "is unknown"),
        ("tiny", "trainer.train_batchsize=1", "no key 'trainer.train_batchsize'; there is trainer.train_batch_size"),
        ("tiny", "hardware=mars", "Could not find 'hardware/mars'.*cpu cpu-nodes gpu node nodes"),
        ("tiny", "trainer.algorithm", "recipe tiny: "),
        ("tiny", "a=[1", "recipe tiny: "),
        ("tiny", "isoexec.out=${nowhere}", "nowhere"),
    ],
)
def test_a_bad_command_line_is_one_message(recipe, override, message):
    with pytest.raises(ContractError, match=message) as error:
        compose(recipe, [override] if override else [])
    assert "\n" not in str(error.value)


#: Overrides of the tiny recipe, and what is said about them. ``{}`` stands for a folder with a checkpoint of 64 tokens of context.
REFUSED = [
    (["trainer.policy.model.path=null"], "trainer.policy.model.path: must be given"),
    (["trainer.policy.model.path=/nowhere"], "no such folder"),
    (["trainer.max_prompt_length=600"], "max_prompt_length 600 .*max_generate_length 8: the model's context holds 512"),
    (["generator.sampling_params.temperature=0"], "temperature: expected more than 0, found 0"),
    (["trainer.algorithm.temperature=0.5"], "temperature"),
    (["generator.sampling_params.top_p=0.9"], "top_p: expected 1.0, found 0.9"),
    (["generator.sampling_params.top_k=20"], "top_k"),
    (["isoexec.arm=both"], "isoexec.arm: expected 'isoexec' or 'native', found 'both'"),
    (["isoexec.contract=/nowhere.json"], "isoexec.contract: no file"),
    (["recipe.task.generator=chain_some"], "'chain_some' is not in reasoning-gym"),
    (["recipe.task.config.max_terms=0"], "max_terms"),
    (["recipe.task.train=0"], "recipe.task.train: expected at least 1, found 0"),
    (["recipe.task.train=many"], "recipe.task.train: expected int, found 'many'"),
    (["recipe.backend=cuda"], "recipe tiny is for cuda, this process sees cpu"),
    (["recipe.backend=tpu"], "recipe.backend: expected cpu or cuda, found 'tpu'"),
    (["trainer.max_prompt_length=12"], "prompts have more than trainer.max_prompt_length = 12 tokens, the longest"),
    (["trainer.max_prompt_length=12", "recipe.drop_long_prompts=true"], "nothing is left"),
    (["recipe.task=null"], "data.train_data: must be given"),
    (["recipe.task=null", "data.train_data=[/nowhere.parquet]"], "data.train_data: no file '/nowhere.parquet'"),
    (["trainer.policy_mini_batch_size=5"], "configuration: "),
    (["trainer.policy_mini_batch_size=64"], r"configuration: refused by utils.py, line \d+: assert .*batch_size >= .*mini_batch_size"),
    (["trainer.train_batch_size=0"], "trainer.train_batch_size: expected at least 1, found 0"),
    (["trainer.train_batch_size='32'"], "trainer.train_batch_size: expected int, found '32'"),
    (["trainer.placement.colocate_all=1"], "trainer.placement.colocate_all: expected bool, found 1"),
    (["trainer.placement.policy_num_gpus_per_node=0"], "policy_num_gpus_per_node: expected at least 1, found 0"),
    (["trainer.policy.megatron_config.tensor_model_parallel_size=0"], "tensor_model_parallel_size: expected at least 1, found 0"),
    (["trainer.algorithm.eps_clip_high=nan"], "trainer.algorithm.eps_clip_high: expected a finite number, found nan"),
    (["trainer.algorithm.eps_clip_high=wide"], "trainer.algorithm.eps_clip_high: expected float, found 'wide'"),
    (["trainer.policy.optimizer_config.adam_betas=[0.9,inf]"], "adam_betas.1: expected a finite number, found inf"),
    (["isoexec.seed=-1"], "isoexec.seed: expected 0 to 4294967295, found -1"),
    (["isoexec.seed=4294967296"], "isoexec.seed: expected 0 to 4294967295, found 4294967296"),
    (["isoexec.seed=null"], "isoexec.seed: expected a whole number, from which problems and samples are drawn, found null"),
    (["trainer.policy.megatron_config.pipeline_model_parallel_size=2"], "configuration: policy_world_size 1 should be divisible"),
    (["generator.inference_engine.tensor_parallel_size=2"], "configuration: Each inference engine DP rank .* must fit within a single node"),
    (["generator.inference_engine.tensor_parallel_size=0"], "inference_engine.tensor_parallel_size: expected at least 1, found 0"),
    (["trainer.algorithm.policy_loss_type=none"], "policy_loss_type"),
    (["trainer.max_prompt_length=abc"], "trainer.max_prompt_length: expected int, found 'abc'"),
    (["trainer.max_prompt_length=null"], "trainer.max_prompt_length: expected int, found null"),
    (["~trainer.policy"], "trainer.policy: must be given; an override took it out"),
    (["recipe=null"], "recipe: expected the section that `base: isoexec`"),
    (["isoexec=null"], "recipe tiny: "),
    (["isoexec.out=null"], "isoexec.out: expected str, found null"),
    (["trainer.policy.model.path=5"], "trainer.policy.model.path: expected str, found 5"),
    (["isoexec.environments=null"], "isoexec.environments: expected a mapping to str, found null"),
    (["isoexec.environments.reasoning_gym=null"], "isoexec.environments: expected a mapping to str, found {'reasoning_gym': None}"),
    (["isoexec.contract=5"], "isoexec.contract: expected str, found 5"),
    (["isoexec.ray_address=5"], "isoexec.ray_address: expected str, found 5"),
    (["trainer.ckpt_path=null"], "trainer.ckpt_path: expected str, found null"),
    (["generator.inference_engine.engine_init_kwargs=null"], "engine_init_kwargs: expected a mapping, found null"),
    (["recipe.task=null", "data.train_data=foo.parquet"], "data.train_data: expected a list of str, found 'foo.parquet'"),
    (["trainer.resume_mode=lates"], "trainer.resume_mode: expected None or 'none' or 'latest' or 'from_path', found 'lates'"),
    (["trainer.algorithm.use_kl_loss=true"], "use_kl_loss: expected False, found True: a run has no reference model"),
    (["trainer.algorithm.use_kl_in_reward=true"], "use_kl_in_reward: expected False"),
    (["isoexec.sync_folder=/nowhere"], "isoexec.sync_folder: expected a folder that can be written to, found '/nowhere'"),
    (["trainer.logger=foo"], "trainer.logger: expected 'wandb' or .*, found 'foo'"),
    (["trainer.algorithm.dynamic_sampling.type=foo"], "dynamic_sampling.type: expected None or 'filter' or 'replace', found 'foo'"),
    (["generator.eval_sampling_params.temperature=-1"], "eval_sampling_params.temperature: expected at least 0, found -1"),
    (["trainer.policy.optimizer_config.adam_betas=[2,3]"], "adam_betas: expected two numbers from 0 to below 1, found .2, 3."),
    (["trainer.algorithm.eps_clip_high=-1"], "eps_clip_high: expected at least 0, found -1"),
    (["trainer.algorithm.overlong_buffer_len=-3"], "overlong_buffer_len: expected 0 to .*max_generate_length, 8, found -3"),
    (["trainer.algorithm.overlong_buffer_len=100"], "overlong_buffer_len: expected 0 to .*max_generate_length, 8, found 100"),
    (["trainer.seed=5"], "trainer.seed: expected isoexec.seed, 0, found 5"),
    (["environment.env_class=nosuch"], "environment.env_class: expected one of .*reasoning_gym.*, found 'nosuch'"),
    (["trainer.train_batch_size=96"], "data.train_data: expected at least trainer.train_batch_size = 96 prompts .*, found 64"),
]


@pytest.mark.parametrize("overrides, message", REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_what_cannot_run_is_refused_before_anything_starts(composed, tmp_path, overrides, message):
    with pytest.raises(ContractError, match=message) as error:
        config = composed("tiny", "recipe.task.train=64", "recipe.task.held_out=16", *overrides)
        config.isoexec.out = str(tmp_path)
        prepare(config, tmp_path / "drawn")
    assert "\n" not in str(error.value)


def test_what_can_run_is_ready(composed, tmp_path):
    config = composed("tiny", "recipe.task.train=64", "recipe.task.held_out=16")
    config.isoexec.out = str(tmp_path)
    ready = prepare(config, tmp_path / "drawn")
    assert "recipe" not in ready.config
    assert [lengths.prompts for lengths in ready.lengths.values()] == [64, 16]
    assert list(ready.config.data.train_data) == [str(tmp_path / "drawn" / "train.jsonl")]
    assert [entry.name for entry in tmp_path.iterdir()] == ["drawn"]


def test_the_recipe_that_the_readme_writes_is_one_that_can_run(tmp_path):
    folder = tmp_path / "recipes"
    shutil.copytree(RECIPES, folder)
    text = (RECIPES / "README.md").read_text()
    (folder / "mine.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    ready = prepare(compose("mine", [f"isoexec.out={tmp_path / 'out'}"], folder), tmp_path / "drawn")
    assert ready.recipe.name == "mine" and ready.config.trainer.max_training_steps == 10
    assert all(lengths.too_long == 0 for lengths in ready.lengths.values())
    groups = [folder for folder in RECIPES.iterdir() if folder.is_dir() and folder.name != "start"]
    for file in (file for group in groups for file in group.iterdir()):
        assert f"`{file.stem}`" in text, f"{file} is not in the table of recipes/README.md"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"defaults: [\n", "recipe mine: .*while parsing"),
        (b"trainer: \xff\n", "recipe mine: .*decode"),
        (b"trainer:\n  max_training_steps: 3\n", "recipe mine: recipe: expected the section that `base: isoexec`"),
    ],
    ids=["no YAML", "not UTF-8", "without base"],
)
def test_a_recipe_that_cannot_be_read_is_one_line(tmp_path, content, message):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ContractError, match=message) as error:
        compose("mine", [], tmp_path)
    assert "\n" not in str(error.value)
