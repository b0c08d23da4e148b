"""One engine process and one trainer process for every planted fault: starting them costs far more than a fault."""

from __future__ import annotations

import os
import random
from pathlib import Path

import faults
import pytest

from isoexec.verify.protocol import WorkerGroup
from isoexec.verify.trace import bundle
from isoexec.verify.trace.bundle import Sequence
from isoexec.verify.trace.report import Report, open_report

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
TEMPERATURE, TOKENS, TIMEOUT = 0.7, 6, 540
#: One that decodes across the end of a chunk of 16 tokens, and one beyond the step's budget of 100.
LENGTHS = (1, 6, 20, 77, 130)


def tied_checkpoint(folder: Path, architecture: str) -> Path:
    """A checkpoint in which the router of layer 1 scores two experts alike."""
    from safetensors.torch import load_file, save_file

    from isoexec.verify.checkpoint import make_checkpoint

    make_checkpoint(folder, architecture)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    [router] = [name for name in tensors if "layers.1.mlp.gate.weight" in name]
    tensors[router][5] = tensors[router][2]
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


class Pair:
    """Both runtimes on one model, in processes of its own or those of ``other``."""

    def __init__(self, group: WorkerGroup, work: Path, architecture: str = ARCHITECTURE, other: Pair | None = None):
        from isoexec.contract import contract_for_model
        from isoexec.verify.run import worker_environment

        self.work, self.architecture = work, architecture
        self.model, self.contract = tied_checkpoint(work / "model", architecture), work / "contract.json"
        self.contract.write_text(contract_for_model(str(self.model), "cpu").to_json())
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = worker_environment(self.contract) | {"PYTHONPATH": path}
        names = ("engine", "trainer")
        self.engine, self.trainer = (getattr(other, n) if other else group.start(n, f"fault_{n}", environment) for n in names)
        self.open()
        draw = random.Random(5)
        self.prompts = [[draw.randrange(3, 512) for _ in range(n)] for n in LENGTHS]
        self.prompts[2][7] = self.prompts[3][40] = faults.CHANGED
        self._clean = None

    def open(self) -> None:
        """Both sides on the model, from its checkpoint."""
        shape = dict(max_num_seqs=64, max_num_batched_tokens=100, max_model_len=256)
        self.trainer.call("open", TIMEOUT, model=str(self.model), contract=str(self.contract), learning_rate=1e-3)
        self.engine.call("open", TIMEOUT, model=str(self.model), contract=str(self.contract), shape=shape)

    def sample(self, fault: str | None = None, **trace) -> tuple[list[dict], Path]:
        """(rollouts, the engine's recording) with a fault planted, or without."""
        file = self.work / "engine.zip"
        rollouts = self._planted(
            self.engine, fault, "generate", prompts=self.prompts, seeds=list(range(len(self.prompts))), temperature=TEMPERATURE,
            max_tokens=TOKENS, one_at_a_time=False, rows=False, trace={"file": str(file), **trace},
        )["rollouts"]  # fmt: skip
        return rollouts, file

    def clean(self) -> tuple[list[dict], Path]:
        """What the engine samples without a fault, recorded once."""
        if self._clean is None:
            rollouts, file = self.sample()
            self._clean = rollouts, file.rename(self.work / "clean.zip")
        return self._clean

    def score(
        self, rollouts, fault: str | None = None, *, temperature=TEMPERATURE, change=None, grad=False, recompute=False, **trace
    ) -> tuple[list[dict], Path]:
        """(scores, the trainer's recording) of what was sampled; ``change`` (sequence, token) scores another token there."""
        file = self.work / "trainer.zip"
        pairs = [[prompt, list(r["tokens"])] for prompt, r in zip(self.prompts, rollouts)]
        if change is not None:
            pairs[change[0]][1][change[1]] ^= 1
        scores = self._planted(
            self.trainer, fault, "score", sequences=pairs, temperature=temperature, packing=[[3, 0], [4, 1, 2]], grad=grad,
            recompute=recompute, rows=True, trace={"file": str(file), **trace},
        )  # fmt: skip
        return scores, file

    def sequences(self, rollouts, scores) -> dict[int, Sequence]:
        return {
            n: Sequence(prompt + r["tokens"], len(prompt), {"engine": r["logprobs"], "trainer": s["logprobs"]})
            for n, (prompt, r, s) in enumerate(zip(self.prompts, rollouts, scores))
        }

    def report(self, rollouts, scores, engine: Path, trainer: Path, second=(None, None)) -> Report:
        file = self.work / "both.zip"
        bundle.join(file, self.sequences(rollouts, scores), list(zip((engine, trainer), second)), {"model": self.architecture})
        return open_report([file])

    def _planted(self, worker, fault, operation, **arguments):
        if fault is None:
            return worker.call(operation, TIMEOUT, **arguments)
        worker.call("plant", TIMEOUT, fault=fault)
        try:
            return worker.call(operation, TIMEOUT, **arguments)
        finally:
            worker.call("plant", TIMEOUT, fault=None)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    work = tmp_path_factory.mktemp("trace")
    with WorkerGroup(work) as group:
        yield Pair(group, work)


@pytest.fixture(scope="module")
def latent(pair, tmp_path_factory):
    """GLM-4.7-Flash in the same processes; they have the other model again afterwards."""
    yield Pair(None, tmp_path_factory.mktemp("latent"), "Glm4MoeLiteForCausalLM", other=pair)
    pair.open()
