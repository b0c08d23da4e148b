"""SkyRL's PPO trainer with the comparison of each step, DAPO's soft overlong punishment, and checkpoints without pickle."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import json
import math
import os
import random
import shutil
from pathlib import Path

import numpy as np
import ray
from loguru import logger
from safetensors import SafetensorError
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import TrainingCallback
from skyrl.train.utils.trainer_utils import cleanup_old_checkpoints

from isoexec.contract import ContractError
from isoexec.runtimes.skyrl import mismatch, resume
from isoexec.runtimes.skyrl.aside import sync, write_synced
from isoexec.runtimes.skyrl.client import EngineCallFailed
from isoexec.runtimes.skyrl.config import TrainConfig, uses_gpus
from isoexec.runtimes.skyrl.dapo import overlong_penalty
from isoexec.runtimes.skyrl.generator import RewardError, sample_seed
from isoexec.runtimes.skyrl.steps import StepLog, step_line
from isoexec.runtimes.skyrl.stream import PromptStream

#: Score from which a sample has passed.
PASS = 1.0


class NothingToLearn(RuntimeError):
    """Dynamic sampling found no groups to train on: every response to a prompt has the same reward."""


class CheckpointNotWritten(OSError):
    """A disk did not take a checkpoint; the one before it is whole."""


class Trainer(RayPPOTrainer):
    """SkyRL's training loop; what a step rolled out is compared with what the trainer computes before anything is trained on.

    Args:
        config: of the run.
        recipe: :func:`isoexec.runtimes.skyrl.resume.identity` of the run, which its checkpoints carry.
    """

    def __init__(self, config: TrainConfig, *, recipe: dict, **kwargs):
        super().__init__(cfg=config, **kwargs)  # sends the log to stderr, from LOG_LEVEL on, and nowhere else
        logger.add(Path(config.trainer.log_path) / "driver.log", level="INFO", backtrace=False, diagnose=False)
        self._own = config.isoexec
        self._recipe = recipe
        self._sampled: list[float] = []  # rewards of the step, of groups that dynamic sampling drops too
        self._batches = 0
        self._exported = False  # the weights of a mismatch
        self.add_callback(_SeedEachStep(config.isoexec.seed))
        self._steps = StepLog(Path(config.isoexec.out) / "steps.jsonl")
        self.add_callback(self._steps)

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        self.train_dataloader = PromptStream(self.train_dataset, self.cfg.trainer.train_batch_size, self.cfg.isoexec.seed)
        self.total_training_steps = self.cfg.trainer.max_training_steps

    async def train(self) -> None:
        try:
            await super().train()
        finally:
            await self.inference_engine_client.teardown()

    async def eval(self, *args, **kwargs) -> dict[str, float]:
        """SkyRL's metrics, and ``eval/all/pass_rate``: the share of responses that pass, as that of a step."""
        self.generator.evaluated.clear()
        metrics = await super().eval(*args, **kwargs)
        rewards = [_total(reward) for reward in self.generator.evaluated]
        return metrics | ({"eval/all/pass_rate": pass_rate(rewards)} if rewards else {})

    # --- rewards ----------------------------------------------------------------------------------------------------------------

    async def generate(self, input_batch):
        version = self.inference_engine_client.weight_version
        output = await super().generate(input_batch)
        self._check_version(version)
        _check_rewards(output["rewards"])
        return output

    def _check_version(self, before: int) -> None:
        """Every token that a step samples is of the same weights, those of the last sync.

        Raises:
            ContractError: they changed while, or between, the step's batches were sampled.
        """
        client = self.inference_engine_client
        expected = self.all_metrics.setdefault("sampled/weight_version", before)
        if not expected == before == client.weight_version:
            raise ContractError(
                f"step {self.global_step}: weight version: expected {expected} for every token, found {before} before a batch was sampled "
                f"and {client.weight_version} after it; nothing is trained on it, report this"
            )

    def handle_dynamic_sampling(self, generator_output, uids):
        self._record(generator_output["rewards"])
        algorithm = self.cfg.trainer.algorithm.dynamic_sampling
        if algorithm.type == "filter" and not _any_group_varies(generator_output["rewards"], uids):
            return self._sample_again(generator_output, uids, algorithm.max_sample_batches)
        return super().handle_dynamic_sampling(generator_output, uids)

    def _sample_again(self, generator_output, uids, limit: int):
        """Drop a whole batch; upstream fails where it joins two of which no group is kept.

        Raises:
            NothingToLearn: ``limit`` batches of the step are sampled.
        """
        state = self.dynamic_sampling_state = self.dynamic_sampling_state or {"sample_batch_count": 0}
        state["sample_batch_count"] += 1
        if 0 < limit <= state["sample_batch_count"]:
            raise NothingToLearn(
                f"step {self.global_step}: {limit} batches (trainer.algorithm.dynamic_sampling.max_sample_batches) have too few groups "
                "whose rewards differ; choose a task that the model solves sometimes, or sample more responses a prompt"
            )
        return generator_output, uids, True

    def _record(self, rewards) -> None:
        self._sampled += map(_total, rewards)
        self._batches += 1

    def postprocess_generator_output(self, generator_output, uids, *args, **kwargs):
        if not self._batches:  # without dynamic sampling
            self._record(generator_output["rewards"])
        self.all_metrics.update(
            {
                "sampled/reward": sum(self._sampled) / len(self._sampled),
                "sampled/pass_rate": pass_rate(self._sampled),
                "sampled/responses": len(self._sampled),
                "sampled/batches": self._batches,
            }
        )
        self._sampled, self._batches = [], 0
        self._punish_length(generator_output)
        return super().postprocess_generator_output(generator_output, uids, *args, **kwargs)

    def _punish_length(self, generator_output) -> None:
        algorithm = self.cfg.trainer.algorithm
        longest = self.cfg.generator.sampling_params.max_generate_length
        rewards = generator_output["rewards"]
        for i, response in enumerate(generator_output["response_ids"]):
            penalty = overlong_penalty(len(response), longest, algorithm.overlong_buffer_len, algorithm.overlong_buffer_penalty_factor)
            if penalty == 0.0:
                continue
            if isinstance(rewards[i], list):
                rewards[i][-1] += penalty
            else:
                rewards[i] += penalty

    # --- the comparison ---------------------------------------------------------------------------------------------------------

    def _skip_policy_forward(self, training_input) -> bool:
        """Never: losses that do not read the policy's own logprobs are compared all the same."""
        return False

    def fwd_logprobs_values_reward(self, training_input):
        training_input = super().fwd_logprobs_values_reward(training_input)
        found = mismatch.compare(training_input["rollout_logprobs"], training_input["action_log_probs"], training_input["loss_mask"])
        self.all_metrics.update(
            {
                "policy/rollout_train_logprobs_abs_diff_mean": found.mean,
                "policy/rollout_train_logprobs_abs_diff_max": found.max,
                "policy/rollout_train_logprobs_abs_diff_std": found.std,
                "policy/rollout_train_tokens": found.tokens,
                "policy/rollout_train_bit_equal": found.bit_equal,
            }
        )
        if found.first is not None and self._own.arm == "isoexec":
            self._report(training_input, found)
        if found.not_finite is not None:
            row, position = found.not_finite
            sides = (training_input[name][row, position].item() for name in ("rollout_logprobs", "action_log_probs"))
            raise mismatch.NotFinite(
                f"step {self.global_step}: logprob of sequence {row}, response token {position}: expected finite numbers, found "
                "{!r} by the engine and {!r} by the trainer; nothing is trained on it; ".format(*sides)
                + "the policy's weights or activations have overflowed: resume before it with a lower learning rate"
            )
        return training_input

    def _report(self, batch, found: mismatch.Mismatch) -> None:
        folder = Path(self._own.out) / f"mismatch-{self.global_step}"
        where = mismatch.write_bundle(
            folder,
            batch,
            found,
            step=self.global_step,
            weight_version=self.inference_engine_client.weight_version,
            temperature=self.cfg.generator.sampling_params.temperature,
            seed=self._seed_of(batch.metadata["uids"], found.first[0]),
            engine_slept=self._engines_sleep,
            captured=not self.cfg.generator.inference_engine.enforce_eager,
        )
        if not self._exported:  # of a run that goes on, the first is enough
            self._export(folder)
            self._exported = True
        message = (
            f"step {self.global_step}: {found.tokens - found.equal} of {found.tokens} tokens differ between rollout and trainer; "
            f"the first: {where}; the first different bit: isoexec trace run --mismatch {folder}"
        )
        if self._own.on_mismatch == "stop":
            raise mismatch.RolloutMismatch(message, folder)
        logger.warning(message)

    def _seed_of(self, prompts: list[str], row: int) -> int:
        """Seed of a batch's row; samples of a prompt follow each other."""
        return sample_seed(self._own.seed, "train", self.global_step, prompts[row], prompts[:row].count(prompts[row]))

    def _export(self, folder: Path) -> None:
        """Both sides' weights, so that the mismatch can be looked at when the run has ended; a side that cannot is told, not raised."""
        contract = Path(self._own.out) / "contract.json"
        shutil.copyfile(contract, folder / contract.name)
        try:
            self.dispatch.save_hf_model("policy", str(folder / "trainer"), self.tokenizer)
            if not self._engines_sleep:
                self._call_engines("isoexec_save_weights", path=str(folder.resolve() / "engine.safetensors"))
        except (ContractError, EngineCallFailed, ray.exceptions.RayError) as error:
            logger.warning(f"{folder}: the weights could not be kept, the mismatch cannot be traced: {error}")

    @property
    def _engines_sleep(self) -> bool:
        """Whether the engines have given their weights up while the policy works: memory that they woke to would hold others."""
        return uses_gpus() and self.cfg.trainer.placement.colocate_all

    def _call_engines(self, method: str, **arguments) -> list:
        """A call from inside a step, which runs in the event loop that waits for it: through a client and a loop of its own."""

        async def call():
            client = copy.copy(self.inference_engine_client)
            try:
                return await client.call(method, **arguments)
            finally:
                await client.teardown()

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, call()).result()

    # --- checkpoints ------------------------------------------------------------------------------------------------------------

    def save_checkpoints(self) -> str:
        """Write ``global_step_<n>``: complete, or not at all.

        Raises:
            CheckpointNotWritten: the disk is full, or fails; what was written of it is gone.
        """
        root = Path(self.cfg.trainer.ckpt_path)
        final = root / f"global_step_{self.global_step}"
        scratch = root / f".{final.name}.partial"
        try:
            self._write_checkpoint(root, final, scratch)
        except (OSError, SafetensorError) as error:  # an actor's error is of its own class too
            shutil.rmtree(scratch, ignore_errors=True)
            fault = getattr(error, "cause", None) or error
            raise CheckpointNotWritten(f"{final} was not written: {fault}; make room for it") from error
        return str(final)

    def _write_checkpoint(self, root: Path, final: Path, scratch: Path) -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self.dispatch.save_checkpoint("policy", str(scratch / "policy"))
        state = {
            "step": self.global_step,
            "recipe": self._recipe,
            "stream": self.train_dataloader.state_dict(),
            "line": step_line(self.global_step, self.all_metrics),  # it is logged when the weights have been synced
        }
        write_synced(scratch / "trainer.json", json.dumps(state))
        for file in scratch.rglob("*.safetensors"):
            sync(file)
        if final.exists():  # of a run that went further and was resumed before it
            shutil.rmtree(final)
        os.replace(scratch, final)
        write_synced(root / "latest_ckpt_global_step.txt", str(self.global_step))
        cleanup_old_checkpoints(str(root), self.cfg.trainer.max_ckpts_to_keep)

    def last_checkpoint(self) -> Path | None:
        """Folder of the last complete checkpoint, of this run or of the one that it continues."""
        return resume.last_checkpoint(Path(self.cfg.trainer.ckpt_path))

    def load_checkpoints(self) -> tuple[int, str | None]:
        """Continue from the checkpoint that ``trainer.resume_mode`` names; (0, None) where there is none.

        Raises:
            ConfigError: it is missing, of another run, or the last one; :func:`isoexec.runtimes.skyrl.run.train` found that before.
        """
        found = resume.judge(self.cfg.trainer, self._recipe)
        if found is None:
            return 0, None
        folder, state = found
        self._steps.resumed = state.get("line")
        self.dispatch.load_checkpoint("policy", str(folder / "policy"))
        self.train_dataloader.load_state_dict(state["stream"])
        for _ in range(state["step"]):  # the syncs of the run that is continued
            self.inference_engine_client.increment_weight_version()
        return state["step"], str(folder)


class _SeedEachStep(TrainingCallback):
    """Python's and NumPy's generators by (run, step): what a step draws needs no state in a checkpoint."""

    def __init__(self, seed: int):
        self._seed = seed

    def on_step_start(self, trainer, callback_input, control) -> None:
        random.seed(f"{self._seed} {callback_input.global_step}")
        np.random.seed(random.getrandbits(32))


def pass_rate(rewards: list[float]) -> float:
    """Share of rewards, at least one, that are :data:`PASS` or more: with partial credit, of full marks."""
    return sum(reward >= PASS for reward in rewards) / len(rewards)


def _check_rewards(rewards) -> None:
    for i, reward in enumerate(rewards):
        parts = reward if isinstance(reward, list) else [reward]
        if not all(isinstance(part, (int, float)) and math.isfinite(part) for part in parts):
            raise RewardError(f"reward of response {i}: expected finite numbers, found {reward!r}; see the environment's scorer")


def _any_group_varies(rewards, uids: list[str]) -> bool:
    """Whether two responses to one prompt have different rewards."""
    first = {}
    return any(first.setdefault(uid, _total(reward)) != _total(reward) for uid, reward in zip(uids, rewards, strict=True))


def _total(reward) -> float:
    return sum(reward) if isinstance(reward, list) else float(reward)


def policy_actors(trainer: RayPPOTrainer) -> list:
    """The policy's workers, as far as they are started."""
    return [] if trainer.policy_model is None else list(trainer.policy_model._actor_handlers)
