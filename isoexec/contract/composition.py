"""The composition: what serves each region of ops in each case, and the rules it obeys."""

from __future__ import annotations

import re
from dataclasses import dataclass

from isoexec.contract import architectures
from isoexec.contract.architectures import CASES, REGIONS, Region
from isoexec.contract.canonical import shown
from isoexec.contract.errors import ContractError

#: How it is known that two cases served by different ops or code give the same bits.
DISCHARGES = ("same", "twin", "equivalence")

_BITS = re.compile(r"0x[0-9a-f]{8}([0-9a-f]{8})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DEVICE = {"cpu": re.compile(r"any|x86_64|aarch64"), "cuda": re.compile(r"any|sm_[0-9]{2,3}")}


@dataclass(frozen=True)
class Entry:
    """One region in the cases that it serves alike.

    Attributes:
        region: a region of the architecture.
        cases: of :data:`CASES`.
        implementations: (op, ``"module:function"``) of every op that may be called here.
        version: of the implementation: of the schedule, or of a provider.
        architecture: ``"any"``, or the one device architecture it is proven on, e.g. ``"sm_90"``.
        constants: (name, bit pattern) of every constant that it reads.
        artifact: sha256 of its sources and binaries.
        gates: tests that must pass for it.
        discharge: ``"same"``: every case of the region runs this implementation; ``"twin"``: another form of it, equal bit for bit by
            ``discharged_by``; ``"equivalence"``: other code, equal by the gate ``discharged_by``.
        discharged_by: a test, empty for ``"same"``.
    """

    region: str
    cases: tuple[str, ...]
    implementations: tuple[tuple[str, str], ...]
    version: str
    architecture: str
    constants: tuple[tuple[str, str], ...]
    artifact: str
    gates: tuple[str, ...]
    discharge: str = "same"
    discharged_by: str = ""

    def __post_init__(self):
        where = f"composition.{shown(self.region).strip(chr(39))}"
        for name in ("region", "version", "architecture", "artifact", "discharge", "discharged_by"):
            if not isinstance(getattr(self, name), str):
                raise ContractError(f"{where}.{name}: expected a string, found {shown(getattr(self, name))}")
        for case in strings(self.cases, f"{where}.cases"):
            if case not in CASES:
                raise ContractError(f"{where}.cases: unknown case {shown(case)}; expected some of {', '.join(CASES)}")
        if len(set(self.cases)) != len(self.cases) or not self.cases:
            raise ContractError(f"{where}.cases: expected each case once and at least one, found {shown(self.cases)}")
        if not strings(self.gates, f"{where}.gates"):
            raise ContractError(f"{where}.gates: an implementation without gates is not proven; name the tests that it passes")
        if not self.version:
            raise ContractError(f"{where}.version: expected the implementation's version, found ''")
        if not _SHA256.fullmatch(self.artifact):
            raise ContractError(f"{where}.artifact: expected a sha256 (64 hex digits), found {shown(self.artifact)}")
        if self.discharge not in DISCHARGES:
            raise ContractError(f"{where}.discharge: expected one of {DISCHARGES}, found {shown(self.discharge)}")
        if bool(self.discharged_by) != (self.discharge != "same"):
            raise ContractError(
                f"{where}.discharged_by: {self.discharge!r} expects {'no test' if self.discharge == 'same' else 'the test that shows it'}, "
                f"found {shown(self.discharged_by)}"
            )
        for name in ("implementations", "constants"):
            object.__setattr__(self, name, pairs(getattr(self, name), f"{where}.{name}"))
        for name, bits in self.constants:
            if not _BITS.fullmatch(bits):
                raise ContractError(f"{where}.constants.{name}: expected a bit pattern such as 0x3f800000, found {shown(bits)}")
        object.__setattr__(self, "cases", tuple(case for case in CASES if case in self.cases))
        object.__setattr__(self, "gates", tuple(sorted(self.gates)))

    def data(self) -> dict:
        """JSON object of the entry."""
        return self.__dict__ | {
            "cases": list(self.cases),
            "gates": list(self.gates),
            "implementations": dict(self.implementations),
            "constants": dict(self.constants),
        }


def check_composition(architecture: str, backend: str, entries: tuple[Entry, ...], numerics: dict) -> None:
    """Refuse a composition that leaves something open, one message per rule.

    Args:
        architecture: HF architecture name.
        backend: ``"cpu"`` or ``"cuda"``.
        entries: in any order.
        numerics: contract constants by name, the form of the Gated DeltaNet core among them; an entry that names a constant must have
            its value.

    Raises:
        ContractError: names the region and case, what is wrong and what to do.
    """
    if architecture not in REGIONS:
        raise ContractError(
            f"composition: no regions are known for {architecture}; expected one of {', '.join(REGIONS)}, or no composition"
        )
    regions = {region.name: region for region in architectures.regions(architecture, numerics["gdn_form"])}
    served: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        if entry.region not in regions:
            raise ContractError(f"composition.{entry.region}: {architecture} has no such region; it has {', '.join(regions)}")
        for case in entry.cases:
            if case not in regions[entry.region].cases:
                raise ContractError(f"composition.{entry.region}: takes no part in {case}; remove the case")
            if (entry.region, case) in served:
                raise ContractError(f"composition.{entry.region}: {case} is covered twice; each op runs once per case, remove one entry")
            served[entry.region, case] = entry
            _check_ops(entry, regions[entry.region], case)
        _check_device(entry, backend)
        for name, bits in entry.constants:
            if name in numerics and int(bits, 16) != numerics[name]:
                raise ContractError(f"composition.{entry.region}.constants.{name}: {bits} is not numerics.{name} {numerics[name]}")
    for region in regions.values():
        for case in region.cases:
            if (region.name, case) not in served:
                raise ContractError(f"composition.{region.name}: {case} is not covered; every op of {architecture} needs an entry in it")
        _check_discharge(region.name, [entry for entry in entries if entry.region == region.name])
    devices = sorted({entry.architecture for entry in entries} - {"any"})
    if len(devices) > 1:
        raise ContractError(f"composition: entries for {' and '.join(devices)}; a contract is for one device architecture")


def _check_ops(entry: Entry, region: Region, case: str) -> None:
    named = {op for op, _ in entry.implementations}
    for op in region.ops(case):
        if op not in named:
            raise ContractError(f"composition.{entry.region}: {case} calls op {op}, which the entry does not implement; add it")
    for op in sorted(named - {*region.trainer, *region.prefill, *region.decode, *region.optional}):
        raise ContractError(f"composition.{entry.region}: op {shown(op)} is not of this region; remove it")


def _check_device(entry: Entry, backend: str) -> None:
    if not _DEVICE[backend].fullmatch(entry.architecture):
        raise ContractError(
            f"composition.{entry.region}.architecture: {shown(entry.architecture)} is no architecture of backend {backend}; build the "
            "contract on the device that will run it"
        )


def _check_discharge(region: str, entries: list[Entry]) -> None:
    """Entries of one region are an asymmetry between cases; each must say how it is known to move no bit."""
    if len(entries) > 1:
        for entry in entries:
            if entry.discharge == "same":
                raise ContractError(
                    f"composition.{region}: {', '.join(entry.cases)} and the other cases are served differently, and nothing says why that "
                    "moves no bit; name a bitwise twin's test or an equivalence gate"
                )
    constants = {name: bits for entry in entries for name, bits in entry.constants}
    for entry in entries:
        for name, bits in constants.items():
            if dict(entry.constants).get(name) != bits:
                raise ContractError(f"composition.{region}.constants.{name}: cases disagree; a constant has one value in every case")


def strings(value, where: str) -> tuple[str, ...]:
    """``value`` as a tuple, if it is a list of strings."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ContractError(f"{where}: expected a list of strings, found {shown(value)}")
    return tuple(value)


def pairs(value, where: str) -> tuple[tuple[str, str], ...]:
    """An object of strings (or its pairs) as pairs in the order of their keys."""
    if not isinstance(value, (dict, tuple)):
        raise ContractError(f"{where}: expected an object of strings, found {shown(value)}")
    items = tuple(value.items()) if isinstance(value, dict) else value
    if not all(isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item) for item in items):
        raise ContractError(f"{where}: expected an object of strings, found {shown(value)}")
    if len(dict(items)) != len(items):
        raise ContractError(f"{where}: a key appears twice; keep one")
    return tuple(sorted(items))
