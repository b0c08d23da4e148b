"""From a composed recipe to a configuration that can start: what a run would stumble over is looked at here first, in one process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from isoexec.contract import ContractError, read_config
from isoexec.contract.weights import check_weights
from isoexec.runtimes.skyrl import environments
from isoexec.runtimes.skyrl.config import check_numbers, resolve
from isoexec.runtimes.skyrl.layout import layout_of, run_contract
from isoexec.runtimes.skyrl.schema import ConfigError
from isoexec.train import data
from isoexec.train.section import RecipeSection, recipe_section


@dataclass(frozen=True)
class Ready:
    """A run that can start.

    Attributes:
        config: for ``isoexec.runtimes.skyrl.run.train``: SkyRL's entries and the section ``isoexec``.
        recipe: the recipe's own section.
        lengths: of the prompts in each file.
    """

    config: DictConfig
    recipe: RecipeSection
    lengths: dict[str, data.Lengths]

    @property
    def out(self) -> Path:
        """Folder of the run's results."""
        return Path(self.config.isoexec.out)


def prepare(composed: DictConfig, folder: Path) -> Ready:
    """Check ``composed``.

    Args:
        composed: of a recipe and overrides.
        folder: where the data of a task is drawn (:func:`isoexec.train.data.write_task`).

    Raises:
        ContractError: what cannot be run, in one line.
    """
    config = OmegaConf.create(OmegaConf.to_container(composed, resolve=True))
    with _as_contract_error():
        check_numbers(OmegaConf.to_container(config))
    recipe = recipe_section(OmegaConf.to_container(config.pop("recipe")))
    _check_backend(recipe)
    if not config.trainer.policy.model.path:
        raise ContractError("trainer.policy.model.path: must be given, as trainer.policy.model.path=FOLDER with a checkpoint in HF format")
    context = _check_model(config)
    if recipe.task is None:
        _check_files(config)
    tokenizer = _tokenizer(config.trainer.policy.model.path)
    if recipe.task is not None:
        train, held_out = data.write_task(recipe.task, config.isoexec.seed, folder)
        config.data.train_data, config.data.val_data = [str(train)], [str(held_out)]
    _check_run(config)
    with _as_contract_error():
        environments.register(config.isoexec.environments, config.environment.env_class)
    return Ready(config, recipe, _check_prompts(config, recipe, tokenizer, context))


def _check_backend(recipe: RecipeSection) -> None:
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if recipe.backend != found:
        advice = "name a recipe for GPUs, or hide them with CUDA_VISIBLE_DEVICES=-1" if found == "cuda" else "run it where there is a GPU"
        raise ContractError(f"recipe.backend: recipe {recipe.name} is for {recipe.backend}, this process sees {found}; {advice}")


def _check_model(config: DictConfig) -> int:
    """Tokens of the model's context.

    Raises:
        ContractError: no such folder, no weights or damaged ones, or a context that prompt and response do not fit.
    """
    path = Path(config.trainer.policy.model.path)
    model = read_config(path)
    if not any(path.glob("*.safetensors")):
        raise ContractError(
            f"model {str(path)!r}: no *.safetensors file, and pickled weights are not loaded; convert them with save_pretrained"
        )
    check_weights(path)
    context = model.get("text_config", model).get("max_position_embeddings")
    prompt, response = config.trainer.max_prompt_length, config.generator.sampling_params.max_generate_length
    if not isinstance(context, int) or prompt + response > context:
        raise ContractError(
            f"trainer.max_prompt_length {prompt} + generator.sampling_params.max_generate_length {response}: the model's context holds "
            f"{context} tokens; lower one of them"
        )
    return context


def _tokenizer(path: str):
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ContractError(f"model {path!r}: its tokenizer cannot be loaded: {' '.join(str(error).split())[:200]}") from error
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise ContractError(f"model {path!r}: its tokenizer needs a chat template and an end-of-sequence token")
    return tokenizer


def _check_files(config: DictConfig) -> None:
    for key in ("train_data", "val_data"):
        files = config.data[key]
        if not files and (key == "train_data" or config.trainer.eval_interval > 0):
            raise ContractError(f"data.{key}: must be given, as data.{key}=[FILE,...]")
        for file in files:
            if not Path(file).is_file():
                raise ContractError(f"data.{key}: no file {file!r}")


def _check_run(config: DictConfig) -> None:
    """What the run itself checks of its configuration: SkyRL's types and rules, those of the contract, and the trainer's layout."""
    with _as_contract_error():
        typed = resolve(config)
    if typed.isoexec.arm == "isoexec":
        run_contract(typed)
    else:
        layout_of(typed)


@contextlib.contextmanager
def _as_contract_error():
    try:
        yield
    except ConfigError as error:
        raise ContractError(" ".join(str(error).split())) from error


def _check_prompts(config: DictConfig, recipe: RecipeSection, tokenizer, context: int) -> dict[str, data.Lengths]:
    limit = config.trainer.max_prompt_length
    found = {}
    for file in (*config.data.train_data, *config.data.val_data):
        lengths = data.check_file(Path(file), config.environment.env_class, tokenizer, limit, environments.names())
        if lengths.too_long and not recipe.drop_long_prompts:
            raise ContractError(
                f"{file}: {lengths.too_long} of {lengths.prompts} prompts have more than trainer.max_prompt_length = {limit} tokens, "
                f"the longest {lengths.longest}, in a context of {context}; raise it, or leave them out with recipe.drop_long_prompts=true"
            )
        if lengths.too_long == lengths.prompts:
            raise ContractError(f"{file}: every prompt has more than trainer.max_prompt_length = {limit} tokens; nothing is left")
        found[file] = lengths
    batch, usable = config.trainer.train_batch_size, sum(found[file].prompts - found[file].too_long for file in config.data.train_data)
    if usable < batch:
        raise ContractError(
            f"data.train_data: expected at least trainer.train_batch_size = {batch} prompts of at most trainer.max_prompt_length tokens, "
            f"found {usable}"
        )
    return found
