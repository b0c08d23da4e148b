"""What a process is: the contract and the evidence of what it runs; and the comparison of two processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from isoexec.contract.canonical import canonical_json, parse_json, sha256_hex, shown
from isoexec.contract.errors import ContractError

PARTS = ("semantic", "numerical_policy", "deployment")

_LONGEST = 160  # characters of a value that are shown

#: Beginning of a path below ``numerical_policy`` -> what to do about a difference; the first that fits.
_ADVICE = (
    ("contract", "start both sides with the same ISOEXEC_CONTRACT file"),
    ("ops", "install the same isoexec on both sides, without local changes; `make patches-check` and `git status` show them"),
    ("launch", "launch configurations are a committed table; install the same isoexec on both sides"),
    ("providers", "install the pinned provider: python -m isoexec.ops._core.provider WHEEL"),
    ("packages.isoexec", "install the same isoexec on both sides, without local changes; `git status` shows them"),
    ("packages", "install the versions of requirements/stack.txt on both sides and build the trees again: make build"),
    ("device", "run both sides on the same device architecture: bits are promised within one"),
    ("settings", "give both sides the same setting"),
    ("math", "leave torch's math modes at their defaults on both sides"),
    ("weights", "sync the weights again and run nothing on them before the manifests agree"),
)


@dataclass(frozen=True)
class Difference:
    """One entry that two processes do not share. ``ours`` and ``theirs`` are canonical JSON, or ``"absent"``."""

    path: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        ours, theirs = self.shown
        return f"{self.path}: {ours} against {theirs}"

    @property
    def shown(self) -> tuple[str, str]:
        """Both values; of long ones what lies about the first character in which they differ."""
        first = next((at for at, (a, b) in enumerate(zip(self.ours, self.theirs)) if a != b), min(len(self.ours), len(self.theirs)))
        start = max(first - 40, 0) if max(len(self.ours), len(self.theirs)) > _LONGEST else 0
        return _cut(self.ours, start), _cut(self.theirs, start)


@dataclass(frozen=True)
class Identity:
    """Of one process.

    Attributes:
        role: ``"engine"``, ``"trainer"`` or another name; not compared.
        semantic: which model.
        numerical_policy: anything that can move a bit.
        deployment: what is known not to.
    """

    role: str
    semantic: dict = field(default_factory=dict)
    numerical_policy: dict = field(default_factory=dict)
    deployment: dict = field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.role, str) or not self.role:
            raise ContractError(f"identity: role: expected a name, found {shown(self.role)}")
        for part in PARTS:
            if not isinstance(getattr(self, part), dict):
                raise ContractError(f"identity: {part}: expected an object, found {shown(getattr(self, part))}")

    def to_json(self) -> str:
        """Canonical JSON text."""
        return canonical_json(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """Parse what :meth:`to_json` wrote.

        Raises:
            ContractError: it is no identity.
        """
        data = parse_json(text, "the identity")
        if not isinstance(data, dict) or set(data) != {"role", *PARTS}:
            raise ContractError(f"the identity: expected an object with role, {', '.join(PARTS)}, found {shown(data)}")
        return cls(**data)

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each part."""
        return {part: sha256_hex(getattr(self, part)) for part in PARTS}


def differences(ours, theirs, path: str = "") -> list[Difference]:
    """Entries in which two JSON values differ, in the order of their paths; lists of objects with a ``region`` go by region and cases."""
    found: list[Difference] = []
    _walk(_keyed(ours), _keyed(theirs), path, found)
    return found


def handshake(ours: Identity, theirs: Identity) -> list[Difference]:
    """Refuse two processes that need not compute the same bits.

    Returns:
        Differences of their deployments, to be logged.

    Raises:
        ContractError: they differ in ``semantic`` or ``numerical_policy``; names the first entry, both values and what to do.
    """
    for part in ("semantic", "numerical_policy"):
        found = differences(getattr(ours, part), getattr(theirs, part), part)
        if found:
            raise ContractError(refusal(ours.role, theirs.role, found))
    return differences(ours.deployment, theirs.deployment, "deployment")


def refusal(ours: str, theirs: str, found: list[Difference]) -> str:
    """One line about the first of ``found``: both values, and what to do."""
    first = found[0]
    more = (
        f" ({len(found) - 1} more entries differ: {', '.join(d.path for d in found[1:4])}{', ...' if len(found) > 4 else ''})"
        if found[1:]
        else ""
    )
    values = first.shown
    return f"{first.path}: {ours} has {values[0]}, {theirs} has {values[1]}; {advice(first.path)}{more}"


def advice(path: str) -> str:
    """What a person does about a difference at ``path``."""
    part, _, rest = path.partition(".")
    if part == "semantic":
        return "open the same checkpoint on both sides, and build the contract from it"
    return next((text for start, text in _ADVICE if rest.startswith(start)), "make both sides equal, or build a new contract")


def _walk(ours, theirs, path: str, found: list[Difference]) -> None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            below = f"{path}.{key}" if path else key
            if key in ours and key in theirs:
                _walk(_keyed(ours[key]), _keyed(theirs[key]), below, found)
            else:
                found.append(Difference(below, _text(ours, key), _text(theirs, key)))
    elif canonical_json(ours) != canonical_json(theirs):  # by text: True == 1 in Python
        found.append(Difference(path or "$", canonical_json(ours), canonical_json(theirs)))


def _keyed(value):
    """A list of composition entries as an object, so that a difference has a name and their order does not matter."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and isinstance(item.get("region"), str) for item in value):
        keyed, regions = {}, [item["region"] for item in value]
        for item in value:
            cases = item.get("cases")
            name = item["region"]
            if regions.count(name) > 1:  # the region is served differently in some cases
                name += f"[{','.join(map(str, cases)) if isinstance(cases, list) else ''}]"
            if name in keyed:
                return value
            keyed[name] = item
        return keyed
    return value


def _text(container: dict, key: str) -> str:
    return canonical_json(container[key]) if key in container else "absent"


def _cut(text: str, start: int) -> str:
    stop = start + _LONGEST
    return f"{'...' if start else ''}{text[start:stop]}{'...' if len(text) > stop else ''}"
