"""An environment whose reward a random policy meets about half the time."""

import os

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

#: Set, the reward is what it says.
REWARD = "ISOEXEC_TEST_REWARD"


class ParityEnv(BaseTextEnv):
    """1.0 for a response whose characters' codes sum to an even number."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(os.environ.get(REWARD) or sum(map(ord, action)) % 2 == 0)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
