"""The contract's types.

An :class:`ExecutionContract` names everything that both sides must share before a token is sampled: the model's
architecture, the backend, the numeric constants of the rounding schedule and the claimed layouts.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from isoexec.contract.canonical import canonical_json, sha256_hex
from isoexec.contract.errors import ContractError

SCHEMA_VERSION = 1
SCHEDULE_VERSION = 1

#: Every place where a policy's logprob is computed.
CASES = ("trainer_forward", "trainer_recompute", "trainer_score", "engine_prefill", "engine_decode")

BACKENDS = ("cpu", "cuda")
GDN_FORMS = ("cpr", "cpr_wy")


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
        for name in ("row_leaves", "vocab_block", "kv_block", "combine_groups", "gdn_chunk"):
            value = getattr(self, name)
            if type(value) is not int or not _power_of_two(value):
                raise ContractError(f"numerics.{name}: expected a power of two, found {value!r}")
        if self.gdn_form not in GDN_FORMS:
            raise ContractError(f"numerics.gdn_form: expected one of {GDN_FORMS}, found {self.gdn_form!r}")


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
                    raise ContractError(f"claims.{f.name}: expected true or false, found {value!r}")
            elif type(value) is not int or value < 1:
                raise ContractError(f"claims.{f.name}: expected a positive integer, found {value!r}")


@dataclass(frozen=True)
class ExecutionContract:
    """What trainer and engine agree on. Immutable; equal contracts have equal canonical JSON.

    Attributes:
        architecture: HF architecture name, e.g. ``"Qwen3ForCausalLM"``.
        backend: ``"cpu"`` or ``"cuda"``. Bits are promised within one backend, never across.
        numerics: constants of the rounding schedule.
        claims: parallel degrees covered.
        schema_version: version of this file format.
        schedule_version: version of docs/schedule.md.
    """

    architecture: str
    backend: str
    numerics: Numerics = field(default_factory=Numerics)
    claims: Claims = field(default_factory=Claims)
    schema_version: int = SCHEMA_VERSION
    schedule_version: int = SCHEDULE_VERSION

    def __post_init__(self):
        if not isinstance(self.architecture, str) or not self.architecture:
            raise ContractError(f"architecture: expected an HF architecture name, found {self.architecture!r}")
        if self.backend not in BACKENDS:
            raise ContractError(f"backend: expected one of {BACKENDS}, found {self.backend!r}")
        for name, known in (("schema_version", SCHEMA_VERSION), ("schedule_version", SCHEDULE_VERSION)):
            if getattr(self, name) != known:
                raise ContractError(
                    f"{name}: this build implements {known}, the contract asks for {getattr(self, name)!r}; "
                    "rebuild the contract with `isoexec contract build`, or install the matching release"
                )
        for side in ("trainer", "engine"):
            degree = getattr(self.claims, f"{side}_tp")
            if self.numerics.row_leaves % degree:
                raise ContractError(
                    f"claims.{side}_tp: {degree} does not divide numerics.row_leaves {self.numerics.row_leaves}; "
                    "a rank must own an aligned subtree of the leaves"
                )
            degree = getattr(self.claims, f"{side}_ep")
            if self.numerics.combine_groups % degree:
                raise ContractError(
                    f"claims.{side}_ep: {degree} does not divide numerics.combine_groups {self.numerics.combine_groups}"
                )

    def to_json(self) -> str:
        """Canonical JSON text of the contract."""
        return canonical_json(dataclasses.asdict(self))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits."""
        return sha256_hex(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExecutionContract:
        """Parse and validate. Unknown, missing and mistyped entries are refused by name.

        Raises:
            ContractError: the text is not JSON, or breaks a rule of the contract.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ContractError(f"the contract is not JSON: {error}") from None
        data = _object(data, cls, "$")
        data["numerics"] = Numerics(**_object(data.get("numerics", {}), Numerics, "numerics"))
        data["claims"] = Claims(**_object(data.get("claims", {}), Claims, "claims"))
        return cls(**data)


def _object(data, cls, where: str) -> dict:
    if not isinstance(data, dict):
        raise ContractError(f"{where}: expected an object, found {type(data).__name__}")
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in known:
            raise ContractError(f"{where}: unknown entry {key!r}; expected {', '.join(known)}")
    for name, f in known.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise ContractError(f"{where}: missing entry {name!r}")
    return dict(data)
