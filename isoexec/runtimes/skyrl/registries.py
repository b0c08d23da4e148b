"""SkyRL's registries of losses and advantage estimators, in Ray actors that import nothing.

SkyRL keeps pickled functions in an actor of each kind, and starts it where it finds none of that name. Its own class lies in a module that
imports torch and transformers: ten seconds of CPU time for each of two dictionaries.
"""

from __future__ import annotations

import ray


class Functions:
    """The protocol of SkyRL's ``RegistryActor``: serialised functions by name."""

    def __init__(self):
        self._functions: dict[str, bytes] = {}

    def register(self, name: str, function: bytes) -> None:
        self._functions[name] = function

    def get(self, name: str) -> bytes | None:
        return self._functions.get(name)

    def list_available(self) -> list[str]:
        return list(self._functions)

    def unregister(self, name: str) -> bytes | None:
        return self._functions.pop(name, None)


def start() -> list:
    """Actors under the names by which SkyRL looks for its own; they live as long as what is returned is kept."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry

    actor = ray.remote(num_cpus=0)(Functions)
    kinds = (PolicyLossRegistry, AdvantageEstimatorRegistry)
    return [actor.options(name=kind._actor_name, get_if_exists=True).remote() for kind in kinds]
