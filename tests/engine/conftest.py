"""In-process engines of small models. Importing vLLM costs far more than an engine, so all of them live in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import random

import pytest
from variants import sample

from isoexec.contract import CONTRACT_VARIABLE
from isoexec.contract.build import contract_for_model
from tests.poison import unwritten_memory

DENSE = "Qwen3ForCausalLM"


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """``made(architecture, seed=0, **numerics)`` -> (checkpoint folder, contract file with these constants); a checkpoint is made once."""

    @functools.cache
    def checkpoint(architecture, seed):
        from isoexec.verify.checkpoint import make_checkpoint

        return make_checkpoint(tmp_path_factory.mktemp("model") / architecture, architecture, seed=seed)

    def make(architecture, seed=0, **numerics):
        folder = checkpoint(architecture, seed)
        contract = contract_for_model(str(folder), "cpu")
        contract = dataclasses.replace(contract, numerics=dataclasses.replace(contract.numerics, **numerics))
        path = tmp_path_factory.mktemp("contract") / "contract.json"
        path.write_text(contract.to_json())
        return folder, str(path)

    return make


@pytest.fixture(scope="session")
def checkpoint(made):
    return made(DENSE)[0]


@pytest.fixture(scope="session")
def other_checkpoint(made):
    return made(DENSE, seed=1)[0]


@pytest.fixture(scope="session")
def contract_file(made):
    return made(DENSE)[1]


@pytest.fixture(scope="session")
def open_engine(contract_file):
    """``with open_engine(model, **shape) as engine``: under the contract, its cache filled with NaN; ``contract=None`` for none, in memory
    as upstream finds it.

    One engine at a time: a fixture that keeps one open is scoped to a class.
    """
    from isoexec.runtimes.vllm.engine import prepare_environment

    prepare_environment()  # vLLM reads some of it on import
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; run `make build`")
    import vllm  # noqa: F401  an import that breaks is a failure, not a skip

    @contextlib.contextmanager
    def opened(model, *, contract=contract_file, **shape):
        from isoexec.runtimes.vllm.engine import RolloutEngine

        with pytest.MonkeyPatch.context() as patch, unwritten_memory(poisoned=bool(contract)):
            patch.setenv(CONTRACT_VARIABLE, contract or "")
            engine = RolloutEngine(model, **shape)
            if contract:
                engine.fill_kv_cache(float("nan"))
            try:
                yield engine
            finally:
                engine.close()

    return opened


@pytest.fixture(scope="module")
def opened(request, made, open_engine):
    """``with opened(**shape) as engine``: of the module's ARCHITECTURE, else of the dense one; another checkpoint of it may come first."""
    folder, contract = made(getattr(request.module, "ARCHITECTURE", DENSE))
    return lambda model=folder, **shape: open_engine(model, **({"contract": contract} | shape))


@pytest.fixture(scope="module")
def together(opened, prompts):
    """Some prompts in one batch: what every other way of running them must give."""
    with opened() as engine:
        return sample(engine, prompts)


@pytest.fixture(scope="class")
def engine(opened):
    """An engine that takes every prompt whole and holds every sequence."""
    with opened() as engine:
        yield engine


@pytest.fixture(scope="session")
def prompts():
    """64 prompts whose lengths lie before, on and after cache blocks (32) and attention blocks (64); pairs share a prefix."""
    draw = random.Random(0)
    lengths = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 150]
    prompts = [[draw.randrange(512) for _ in range(lengths[i % len(lengths)])] for i in range(64)]
    for i in range(8, 64, 12):  # 127 tokens, followed by a prompt of 128 that begins with the same 100
        prompts[i + 1][:100] = prompts[i][:100]
    return prompts
