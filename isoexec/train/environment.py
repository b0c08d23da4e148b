"""A SkyRL-Gym environment of one turn: a reasoning-gym problem, scored by its own generator."""

from __future__ import annotations

import json
import math
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from isoexec.contract import ContractError
from isoexec.train import tasks


class ReasoningGymEnv(BaseTextEnv):
    """Scores a response with the generator named in its row (see :func:`isoexec.train.tasks.row`).

    The answer is the text between the last ``<answer>`` and ``</answer>`` if the response has them, else the whole response; outer
    white space does not count.
    """

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None):
        super().__init__()
        extras = extras or {}
        missing = [name for name in ("generator", "generator_config", "entry") if name not in extras]
        if missing:
            raise ContractError(
                f"environment {tasks.ENVIRONMENT}: the row lacks {', '.join(missing)}; write data sets with isoexec.train.tasks, or name "
                "another env_class"
            )
        self.generator = extras["generator"]
        self.entry = json.loads(extras["entry"])
        self.partial_credit = bool(extras.get("partial_credit", False))
        self.score = tasks.scorer(self.generator, extras["generator_config"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """The reward of a response; always the last turn.

        Raises:
            ContractError: the scorer raised, or gave something that is no finite number.
        """
        answer = answer_of(action)
        try:
            score = self.score(answer, self.entry)
            number = float(score)
        except Exception as error:
            raise ContractError(
                f"reward: the scorer of {self.generator} raised {type(error).__name__}: {error}, on the answer {answer[:80]!r}; "
                "nothing is trained on a reward that is not known"
            ) from error
        if not math.isfinite(number):
            raise ContractError(
                f"reward: the scorer of {self.generator} gave {score!r} for the answer {answer[:80]!r}, expected a finite number; "
                "nothing is trained on it"
            )
        reward = number if self.partial_credit else float(number >= 1.0)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"score": number})


def answer_of(response: str) -> str:
    """What of a response is scored."""
    _, opened, rest = response.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    return (inside if opened and closed else response).strip()
