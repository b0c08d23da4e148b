"""Rollouts with one sampling seed for each sample."""

from __future__ import annotations

import hashlib
import sys

from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

from isoexec.contract import ContractError


class RewardError(ValueError):
    """An environment raised, or gave a reward that is no finite number."""


def sampling_seed(*key) -> int:
    """Seed of a key such as (run, phase, step, prompt, sample): 62 bits of its hash."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 2


def sample_seed(run_seed: int, phase: str, step: int, prompt: str, sample: int) -> int:
    """Seed of one sample of a run; ``step`` is 0 in evaluation, so that two evaluations differ by the weights alone."""
    return sampling_seed(sampling_seed(run_seed, phase, step), prompt, sample)


class SeededGenerator(SkyRLGymGenerator):
    """SkyRL's generator; what a sample becomes depends on the run's seed, the step, the prompt and the sample, not on the batch.

    Evaluation leaves the step out, so that two evaluations differ by the weights alone.

    Attributes:
        evaluated: rewards of the responses sampled for evaluation, until it is cleared.
    """

    def __init__(self, *args, run_seed: int, **kwargs):
        super().__init__(*args, **kwargs)
        self._run_seed = run_seed
        self.evaluated: list = []

    async def generate(self, input_batch, disable_tqdm: bool = False):
        batch = input_batch.get("batch_metadata")
        phase, step = ("train", 0) if batch is None else (batch.training_phase, batch.global_step)
        params = dict(input_batch["sampling_params"])
        params["min_tokens"] = 0  # SkyRL asks for 1, which masks the end of sequence at the first token
        if params["temperature"] > 0:
            params["seed"] = sampling_seed(self._run_seed, phase, step if phase == "train" else 0)
        else:
            params.pop("logprobs", None)  # a greedy token is not drawn from a distribution
        hidden = disable_tqdm or not sys.stderr.isatty()  # its bar would be a line for each batch in a file
        output = await super().generate({**input_batch, "sampling_params": params}, hidden)
        if phase == "eval":
            self.evaluated += output["rewards"]
        return output

    async def agent_loop(self, *args, sampling_params=None, trajectory_id=None, **kwargs):
        if "seed" in sampling_params:
            seed = sampling_seed(sampling_params["seed"], trajectory_id.instance_id, trajectory_id.repetition_id)
            sampling_params = {**sampling_params, "seed": seed}
        return await super().agent_loop(*args, sampling_params=sampling_params, trajectory_id=trajectory_id, **kwargs)

    @staticmethod
    def _make_env(name: str, **arguments):
        """Where upstream makes an environment.

        Raises:
            RewardError: its constructor raised.
        """
        try:
            return SkyRLGymGenerator._make_env(name, **arguments)
        except ContractError:  # says all of it
            raise
        except Exception as error:
            raise RewardError(
                f"environment {name} cannot be made: its constructor raised {type(error).__name__}: {' '.join(str(error).split())[:400]}; "
                "nothing is trained on"
            ) from error

    async def _run_in_executor_if_available(self, func, *args, **kwargs):
        """Where upstream calls an environment.

        Raises:
            RewardError: it raised; its class and method are named.
            ContractError: it gives another text than was sampled, which upstream would tokenise anew.
        """
        try:
            answer = await super()._run_in_executor_if_available(func, *args, **kwargs)
        except ContractError:  # says all of it
            raise
        except Exception as error:
            raise RewardError(
                f"environment {func.__qualname__} raised {type(error).__name__}: {error}; nothing is trained on a reward that is not known"
            ) from error
        if isinstance(answer, dict) and answer.get("postprocessed_action") is not None:
            raise ContractError(
                f"environment {func.__qualname__}: postprocessed_action: expected none, found {answer['postprocessed_action'][:80]!r}: its "
                "tokens would not be those that were sampled; judge the response as it is"
            )
        return answer
