"""An environment whose reward a random policy meets about half the time."""

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class ParityEnv(BaseTextEnv):
    """1.0 for a response whose characters' codes sum to an even number."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=float(sum(map(ord, action)) % 2 == 0), done=True, metadata={})
