"""What is compared: how the engine samples, and how the trainer scores what was sampled.

A setting is one way to bring prompts through the engine, with the packings in which the trainer recomputes the result. Every setting
names the evidence that it exercised what it claims; a run without that evidence is inconclusive, not passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

#: Architectures of which a run without a model makes a checkpoint: every kind of layer, with a vision tower beside it and without.
MADE_ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Glm4MoeLiteForCausalLM",
)

#: Longest sequence of an engine: the longest prompt and its new tokens fit.
MAX_MODEL_LEN = 512

#: Evidence a setting may require; the engine worker counts each of them while the setting samples.
EVIDENCE = {
    "cached_tokens": "no prompt token came from the prefix cache",
    "chunked_prompts": "no prompt was prefilled in more than one chunk",
    "preemptions": "no request was preempted",
    "replays": "no step was the replay of a CUDA graph",
    "changed_logprobs": "the optimizer step changed no logprob, so stale weights would not be seen",
}


@dataclass(frozen=True)
class EngineShape:
    """Arguments of one engine instance that decide how it cuts and batches work."""

    name: str
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = False
    max_model_len: int = MAX_MODEL_LEN
    cuda_graphs: bool = False

    def arguments(self) -> dict:
        """Keyword arguments of the engine, without the name."""
        return {key: value for key, value in self.__dict__.items() if key != "name"}


@dataclass(frozen=True)
class Scoring:
    """How the trainer recomputes the logprobs of a setting.

    Attributes:
        name: appended to the setting's name in the report.
        pack_tokens: most tokens in one packed micro-batch; sequences are shuffled by ``pack_seed`` first.
        grad: keep the autograd graph, as in training.
        recompute: run the backward pass and recompute activations in it.
    """

    name: str
    pack_tokens: int
    pack_seed: int
    grad: bool = False
    recompute: bool = False


SCORE = Scoring("score", pack_tokens=1024, pack_seed=1)
FORWARD = Scoring("forward", pack_tokens=777, pack_seed=2, grad=True)
RECOMPUTE = Scoring("recompute", pack_tokens=1500, pack_seed=3, grad=True, recompute=True)
EVERY_SCORING = (SCORE, FORWARD, RECOMPUTE)


@dataclass(frozen=True)
class Setting:
    """One way of sampling.

    Attributes:
        name: as reported.
        scorings: trainer passes over the result.
        temperature: of the distribution that is sampled and scored.
        max_tokens: new tokens for each prompt.
        prompts: number of prompts taken from the front of the list, None for all.
        one_at_a_time: submit a prompt when the one before has finished.
        permuted: submit in another order than the prompts have.
        evict_at: engine steps after which every running request is evicted.
        evidence: keys of :data:`EVIDENCE` that must be positive.
    """

    name: str
    scorings: tuple[Scoring, ...] = (SCORE,)
    temperature: float = 1.0
    max_tokens: int = 96
    prompts: int | None = None
    one_at_a_time: bool = False
    permuted: bool = False
    evict_at: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineRun:
    """One engine instance: settings at the first weights, then settings after an optimizer step and a weight sync."""

    shape: EngineShape
    before: tuple[Setting, ...]
    after_sync: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything one arm runs for one model.

    ``after_sync`` of every engine run uses the same second weights, from one optimizer step on the samples of ``train_on``. The native arm,
    which proves nothing, makes only the first scoring of a setting unless ``every_native_scoring``.
    """

    engines: tuple[EngineRun, ...]
    prompt_count: int = 48
    seed: int = 20
    train_on: str = "together"
    learning_rate: float = 1e-3
    every_native_scoring: bool = False
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self):
        names = tuple(s.name for run in self.engines for s in (*run.before, *run.after_sync))
        if len(set(names)) != len(names):
            raise ValueError(f"setting names repeat: {sorted(n for n in names if names.count(n) > 1)}")
        if self.train_on not in {s.name for run in self.engines for s in run.before}:
            raise ValueError(f"train_on {self.train_on!r} is no setting at the first weights")
        object.__setattr__(self, "names", names)

    def limited(self, prompts: int | None, tokens: int | None) -> Plan:
        """The plan with at most ``prompts`` prompts and ``tokens`` new tokens for each (None: no other limit)."""

        def cut(settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
            return tuple(replace(s, max_tokens=min(s.max_tokens, tokens or s.max_tokens)) for s in settings)

        engines = tuple(replace(run, before=cut(run.before), after_sync=cut(run.after_sync)) for run in self.engines)
        return replace(self, engines=engines, prompt_count=min(self.prompt_count, prompts or self.prompt_count))

    def captured(self) -> Plan:
        """The plan with decode steps in CUDA graphs, which have to be replayed wherever tokens are sampled."""

        def evident(settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
            return tuple(replace(s, evidence=(*s.evidence, "replays")) for s in settings)

        engines = tuple(
            EngineRun(replace(run.shape, cuda_graphs=True), evident(run.before), evident(run.after_sync)) for run in self.engines
        )
        return replace(self, engines=engines)


#: An odd budget: no chunk boundary but the first falls on a block or chunk length.
CHUNK_BUDGET = 100
#: With prompts prefilled in a few steps, the first falls within the first eight new tokens, the second among later ones.
EVICT_AT = (6, 20)

WHOLE = EngineShape("whole")
CHUNKED = EngineShape("chunked", max_num_batched_tokens=CHUNK_BUDGET)
PREFIX = EngineShape("prefix", enable_prefix_caching=True)
CHUNKED_PREFIX = EngineShape("chunked prefix", max_num_batched_tokens=CHUNK_BUDGET, enable_prefix_caching=True)


def quick_plan() -> Plan:
    """The default: every behaviour of the engine once, every pass of the trainer at least twice."""
    return Plan(
        engines=(
            EngineRun(
                WHOLE,
                before=(
                    Setting("one at a time", prompts=8, max_tokens=24, one_at_a_time=True),
                    Setting("together", scorings=EVERY_SCORING, max_tokens=96),
                    Setting("together, T=0.7", scorings=(FORWARD,), temperature=0.7, max_tokens=32),
                    Setting("preempted", scorings=(FORWARD,), max_tokens=48, evict_at=EVICT_AT, evidence=("preemptions",)),
                ),
            ),
            EngineRun(CHUNKED, before=(Setting("chunked prefill", max_tokens=16, evidence=("chunked_prompts",)),)),
            EngineRun(
                PREFIX,
                before=(
                    Setting("prefix cache, cold", max_tokens=16),
                    Setting("prefix cache, warm", max_tokens=16, evidence=("cached_tokens",)),
                    Setting("prefix cache, permuted", max_tokens=16, permuted=True, evidence=("cached_tokens",)),
                ),
                after_sync=(
                    Setting("after sync", scorings=(SCORE, RECOMPUTE), max_tokens=32, evidence=("changed_logprobs",)),
                    Setting(
                        "after sync, warm, T=0.7",
                        scorings=(FORWARD,),
                        temperature=0.7,
                        max_tokens=16,
                        evidence=("cached_tokens",),
                    ),
                ),
            ),
        )
    )


def brief_plan() -> Plan:
    """Every setting of :func:`quick_plan` on fewer tokens, for the architectures beside the first."""
    return quick_plan().limited(prompts=16, tokens=48)


def control_plan() -> Plan:
    """The negative control: one setting, to be run against a trainer whose weights are off by one ulp."""
    return Plan(engines=(EngineRun(WHOLE, before=(Setting("together", max_tokens=16),)),))


def full_plan() -> Plan:
    """The whole matrix: every engine shape, both temperatures, every trainer pass, all of it again after a sync."""
    budgets = (33, CHUNK_BUDGET, 193)
    chunked = [EngineShape(f"chunked {n}", max_num_seqs=min(n, 64), max_num_batched_tokens=n) for n in budgets]
    shapes = (
        (WHOLE, ()),
        *((shape, ("chunked_prompts",)) for shape in chunked),
        (PREFIX, ()),
        (CHUNKED_PREFIX, ("chunked_prompts",)),
    )
    return Plan(engines=tuple(_full_run(shape, evidence) for shape, evidence in shapes), prompt_count=64, train_on="whole", every_native_scoring=True)


def _full_run(shape: EngineShape, evidence: tuple[str, ...]) -> EngineRun:
    before, after = [], []
    for temperature in (1.0, 0.7):
        common = dict(scorings=EVERY_SCORING, temperature=temperature)
        suffix = "" if temperature == 1.0 else f", T={temperature}"
        # With a prefix cache the second temperature finds what the first one cached, so that little is left to cut.
        cold = evidence if temperature == 1.0 or not shape.enable_prefix_caching else ()
        before.append(Setting(f"{shape.name}{suffix}", evidence=cold, **common))
        after.append(Setting(f"{shape.name}, after sync{suffix}", evidence=cold, **common))
        evicted = dict(common, evict_at=EVICT_AT, evidence=("preemptions",))
        before.append(Setting(f"{shape.name}, preempted{suffix}", **evicted))
        if shape is WHOLE:
            before.append(Setting(f"one at a time{suffix}", prompts=8, one_at_a_time=True, **common))
        if shape.enable_prefix_caching:
            cached = dict(common, evidence=("cached_tokens",))
            for settings, when in ((before, ""), (after, ", after sync")):
                settings.append(Setting(f"{shape.name}, warm{when}{suffix}", **cached))
                settings.append(Setting(f"{shape.name}, permuted{when}{suffix}", permuted=True, **cached))
    return EngineRun(shape, tuple(before), tuple(after))
