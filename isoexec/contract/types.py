"""The contract's types.

An :class:`ExecutionContract` names everything that both sides must share before a token is sampled: the model's
architecture, the backend, the numeric constants of the rounding schedule and the claimed layouts.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

from isoexec.contract import architectures
from isoexec.contract.architectures import CASES as CASES
from isoexec.contract.canonical import canonical_json, parse_json, sha256_hex, shown
from isoexec.contract.composition import Entry, check_composition, pairs, strings
from isoexec.contract.errors import ContractError

SCHEMA_VERSION = 2
SCHEDULE_VERSION = 1

BACKENDS = ("cpu", "cuda")
#: What no contract allows, whatever else it says; the runtimes' tables of settings hold the details.
REFUSED = (
    "compiled_graphs",
    "kv_cache_quantization",
    "kv_transfer",
    "lora",
    "logits_processors",
    "penalties",
    "quantization",
    "raw_logprobs",
    "speculative_decoding",
    "top_k",
    "top_p",
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
GDN_FORMS = ("cpr", "cpr_wy")
GDN_CHUNKS = (16, 32, 64)


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class Numerics:
    """Constants of the rounding schedule (docs/schedule.md). A change of any of them changes bits.

    Attributes:
        row_leaves: G, equal parts into which the K of a row-parallel product is cut; bounds the tensor-parallel degree.
        vocab_block: vocabulary entries per partial sum of the log-softmax.
        kv_block: keys per step of the online softmax, counted from position 0.
        combine_groups: E_G, contiguous expert groups of the combine tree; bounds the expert-parallel degree.
        gdn_form: form of the Gated DeltaNet core, ``"cpr"`` or ``"cpr_wy"``.
        gdn_chunk: tokens per Gated DeltaNet chunk, aligned to absolute position 0.
    """

    row_leaves: int = 8
    vocab_block: int = 64
    kv_block: int = 64
    combine_groups: int = 8
    gdn_form: str = "cpr_wy"
    gdn_chunk: int = 16

    def __post_init__(self):
        for name in ("row_leaves", "vocab_block", "kv_block", "combine_groups"):
            value = getattr(self, name)
            if type(value) is not int or not _power_of_two(value):
                raise ContractError(f"numerics.{name}: expected a power of two, found {shown(value)}")
        if type(self.gdn_chunk) is not int or self.gdn_chunk not in GDN_CHUNKS:
            raise ContractError(f"numerics.gdn_chunk: expected one of {GDN_CHUNKS}, found {shown(self.gdn_chunk)}")
        if self.gdn_form not in GDN_FORMS:
            raise ContractError(f"numerics.gdn_form: expected one of {GDN_FORMS}, found {shown(self.gdn_form)}")


@dataclass(frozen=True)
class Claims:
    """Largest parallel degrees under which the contract promises the same bits, per side.

    ``tp``: tensor, ``ep``: expert, ``cp``: context, ``pp``: pipeline, ``sp``: sequence parallel on or off. Data parallelism
    moves no bits and is not limited.
    """

    trainer_tp: int = 1
    trainer_ep: int = 1
    trainer_cp: int = 1
    trainer_pp: int = 1
    trainer_sp: bool = False
    engine_tp: int = 1
    engine_ep: int = 1
    engine_pp: int = 1

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_sp"):
                if type(value) is not bool:
                    raise ContractError(f"claims.{f.name}: expected true or false, found {shown(value)}")
            elif type(value) is not int or value < 1:
                raise ContractError(f"claims.{f.name}: expected a positive integer, found {shown(value)}")


@dataclass(frozen=True)
class LogprobRule:
    """Whose logprob it is. Each entry has one value that is implemented; a contract that asks for another is refused.

    Attributes:
        mode: ``"processed"``, of the distribution that was sampled.
        temperature: ``"fp32_division"``, logits / T with T an fp32 tensor, by the same op on both sides; any T > 0.
        top_p: bit pattern of 1.0, off.
        top_k: 0, off.
        vocab_padding: ``"selected_away"``, entries beyond the vocabulary are -inf by selection and are never sampled.
    """

    mode: str = "processed"
    temperature: str = "fp32_division"
    top_p: str = "0x3f800000"
    top_k: int = 0
    vocab_padding: str = "selected_away"

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if type(value) is not type(f.default) or value != f.default:
                raise ContractError(
                    f"logprobs.{f.name}: expected {f.default!r}, found {shown(value)}: the trainer could not reproduce these logprobs; "
                    "rebuild the contract with `isoexec contract build`"
                )


@dataclass(frozen=True)
class ExecutionContract:
    """What trainer and engine agree on. Immutable; equal contracts have equal canonical JSON.

    Attributes:
        architecture: HF architecture name, e.g. ``"Qwen3ForCausalLM"``.
        backend: ``"cpu"`` or ``"cuda"``. Bits are promised within one backend, never across.
        numerics: constants of the rounding schedule.
        claims: parallel degrees covered.
        model: sha256 of the model's configuration, or ``""`` for any of the architecture.
        logprobs: whose logprob it is.
        dtypes: (end of a parameter's name, or a state's, dtype); ``*`` stands for every other parameter. None: those of the architecture.
        obligations: (state that outlives a step, events after which it must not be read). None: those of the architecture.
        refused: features that are refused.
        composition: what serves each region of ops in each case; () leaves it to the comparison of the two processes.
        deployment: (name, value) of what is known to move no bit: compared and logged, never refused.
        schema_version: version of this file format.
        schedule_version: version of docs/schedule.md.
    """

    architecture: str
    backend: str
    numerics: Numerics = field(default_factory=Numerics)
    claims: Claims = field(default_factory=Claims)
    model: str = ""
    logprobs: LogprobRule = field(default_factory=LogprobRule)
    dtypes: tuple[tuple[str, str], ...] | None = None
    obligations: tuple[tuple[str, tuple[str, ...]], ...] | None = None
    refused: tuple[str, ...] = REFUSED
    composition: tuple[Entry, ...] = ()
    deployment: tuple[tuple[str, str], ...] = ()
    schema_version: int = SCHEMA_VERSION
    schedule_version: int = SCHEDULE_VERSION

    def __post_init__(self):
        if not isinstance(self.architecture, str) or not self.architecture:
            raise ContractError(f"architecture: expected an HF architecture name, found {shown(self.architecture)}")
        if self.backend not in BACKENDS:
            raise ContractError(f"backend: expected one of {BACKENDS}, found {shown(self.backend)}")
        for name, known in (("schema_version", SCHEMA_VERSION), ("schedule_version", SCHEDULE_VERSION)):
            if type(getattr(self, name)) is not int or getattr(self, name) != known:
                raise ContractError(
                    f"{name}: this build implements {known}, the contract asks for {shown(getattr(self, name))}; "
                    "rebuild the contract with `isoexec contract build`, or install the matching release"
                )
        if not isinstance(self.model, str) or (self.model and not _SHA256.fullmatch(self.model)):
            raise ContractError(f"model: expected a sha256 (64 hex digits) or '', found {shown(self.model)}")
        self._check_degrees()
        self._check_states()
        object.__setattr__(self, "deployment", pairs(self.deployment, "deployment"))
        if sorted(strings(self.refused, "refused")) != sorted(REFUSED):
            differing = sorted(set(REFUSED) ^ set(self.refused)) or ["an entry twice"]
            raise ContractError(
                f"refused: expected exactly {', '.join(REFUSED)}; found a difference in {shown(differing)}; "
                "rebuild the contract with `isoexec contract build`"
            )
        object.__setattr__(self, "refused", tuple(sorted(self.refused)))
        self._check_composition()

    def _check_degrees(self) -> None:
        for side in ("trainer", "engine"):
            degree = getattr(self.claims, f"{side}_tp")
            if self.numerics.row_leaves % degree:
                raise ContractError(
                    f"claims.{side}_tp: {degree} does not divide numerics.row_leaves {self.numerics.row_leaves}; "
                    "a rank must own an aligned subtree of the leaves"
                )
            degree = getattr(self.claims, f"{side}_ep")
            if self.numerics.combine_groups % degree:
                raise ContractError(f"claims.{side}_ep: {degree} does not divide numerics.combine_groups {self.numerics.combine_groups}")

    def _check_states(self) -> None:
        """dtypes and obligations must be those that the architecture's ops have; a contract that says otherwise describes other code."""
        expected = architectures.dtypes(self.architecture)
        found = expected if self.dtypes is None else dict(pairs(self.dtypes, "dtypes"))
        _check_table("dtypes", expected, found)
        object.__setattr__(self, "dtypes", tuple(sorted(found.items())))
        expected = architectures.obligations(self.architecture)
        if self.obligations is None:
            states = expected
        else:
            items = self.obligations.items() if isinstance(self.obligations, dict) else self.obligations
            states = {state: tuple(sorted(strings(events, f"obligations.{state}"))) for state, events in items}
        _check_table("obligations", expected, states)
        object.__setattr__(self, "obligations", tuple(sorted(states.items())))

    def _check_composition(self) -> None:
        entries = self.composition
        if not isinstance(entries, tuple) or not all(isinstance(entry, Entry) for entry in entries):
            raise ContractError(f"composition: expected a list of entries, found {shown(entries)}")
        if entries:
            check_composition(self.architecture, self.backend, entries, dataclasses.asdict(self.numerics))
        object.__setattr__(self, "composition", tuple(sorted(entries, key=lambda entry: (entry.region, entry.cases))))

    def data(self) -> dict:
        """JSON object of the contract."""
        return self.__dict__ | {
            "numerics": dataclasses.asdict(self.numerics),
            "claims": dataclasses.asdict(self.claims),
            "logprobs": dataclasses.asdict(self.logprobs),
            "dtypes": dict(self.dtypes),
            "obligations": {state: list(events) for state, events in self.obligations},
            "refused": list(self.refused),
            "composition": [entry.data() for entry in self.composition],
            "deployment": dict(self.deployment),
        }

    def to_json(self) -> str:
        """Canonical JSON text of the contract."""
        return canonical_json(self.data())

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits."""
        return sha256_hex(self.data())

    def parts(self) -> dict[str, dict]:
        """The contract by what an entry decides: ``semantic``: which model; ``numerical_policy``: anything that can move a bit;
        ``deployment``: what cannot."""
        data = self.data()
        deployment = data.pop("deployment")
        return {
            "semantic": {"architecture": self.architecture, "model": self.model},
            "numerical_policy": data,
            "deployment": deployment,
        }

    @property
    def identities(self) -> dict[str, str]:
        """SHA-256 of each of :meth:`parts`."""
        return {name: sha256_hex(part) for name, part in self.parts().items()}

    @classmethod
    def from_json(cls, text: str) -> ExecutionContract:
        """Parse and validate. Unknown, missing and mistyped entries are refused by name.

        Raises:
            ContractError: the text is not JSON, or breaks a rule of the contract.
        """
        data = _object(parse_json(text), cls, "$")
        for name, part in (("numerics", Numerics), ("claims", Claims), ("logprobs", LogprobRule)):
            data[name] = part(**_object(data.get(name, {}), part, name))
        for name in ("dtypes", "obligations", "deployment"):
            if name in data and not isinstance(data[name], dict):
                raise ContractError(f"{name}: expected an object, found {shown(data[name])}")
        entries = data.get("composition", [])
        if not isinstance(entries, list):
            raise ContractError(f"composition: expected a list of entries, found {shown(entries)}")
        data["composition"] = tuple(Entry(**_object(entry, Entry, f"composition[{i}]")) for i, entry in enumerate(entries))
        return cls(**data)


def _check_table(what: str, expected: dict, found: dict) -> None:
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            name, value = shown(key).strip(chr(39)), shown(found.get(key, "none"))
            raise ContractError(
                f"{what}.{name}: expected {expected.get(key, 'no such entry')}, found {value}; "
                "rebuild the contract with `isoexec contract build`"
            )


def _object(data, cls, where: str) -> dict:
    if not isinstance(data, dict):
        raise ContractError(f"{where}: expected an object, found {type(data).__name__}")
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in known:
            raise ContractError(f"{where}: unknown entry {shown(key)}; expected {', '.join(known)}")
    for name, f in known.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise ContractError(f"{where}: missing entry {name!r}")
    return dict(data)
