"""Weight manifests: name, shape, dtype and digest of every logical tensor, the same whatever the layout that held it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from isoexec.contract.canonical import parse_json, sha256_hex, shown
from isoexec.contract.errors import ContractError
from isoexec.contract.types import ExecutionContract

_WORD = 1 << 64


@dataclass(frozen=True)
class TensorDigest:
    """Digest of a logical tensor, or of the part that one rank holds.

    Attributes:
        shape: of the whole tensor.
        dtype: ``"bfloat16"``, ``"float32"`` and so on.
        total: sum modulo 2^64 of the mixed (global index, bits) of its elements (:mod:`isoexec.ops._core.digest`).
        elements: number of elements that went in.
    """

    shape: tuple[int, ...]
    dtype: str
    total: int
    elements: int

    @property
    def size(self) -> int:
        """Elements of the whole tensor."""
        size = 1
        for length in self.shape:
            size *= length
        return size

    def __add__(self, other: TensorDigest) -> TensorDigest:
        """The digest of both parts; parts must not overlap.

        Raises:
            ContractError: they are parts of different tensors.
        """
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            raise ContractError(
                f"weights: parts of different tensors: {self.dtype}{list(self.shape)} and {other.dtype}{list(other.shape)}; "
                "expected shards of one"
            )
        return TensorDigest(self.shape, self.dtype, (self.total + other.total) % _WORD, self.elements + other.elements)


class Manifest:
    """Digests by logical name (the checkpoint's)."""

    def __init__(self, tensors: Mapping[str, TensorDigest]):
        self.tensors = dict(sorted(tensors.items()))

    @classmethod
    def of_ranks(cls, parts: Iterable[Mapping[str, TensorDigest]]) -> Manifest:
        """The manifest of parts held by several ranks, in any order; what several ranks hold whole must be given once.

        Raises:
            ContractError: elements of a tensor are missing, or came twice.
        """
        whole: dict[str, TensorDigest] = {}
        for part in parts:
            for name, digest in part.items():
                whole[name] = whole[name] + digest if name in whole else digest
        manifest = cls(whole)
        manifest.check_complete()
        return manifest

    def check_complete(self) -> None:
        """Refuse a manifest whose tensors are not covered exactly once.

        Raises:
            ContractError: names the tensor.
        """
        for name, digest in self.tensors.items():
            if digest.elements != digest.size:
                raise ContractError(
                    f"weights.{name}: digested {digest.elements} of {digest.size} elements; every element goes in once: replicas are left "
                    "out, shards of every rank are given"
                )

    def data(self) -> dict:
        """JSON object: name -> shape, dtype and digest."""
        return {
            name: {"shape": list(d.shape), "dtype": d.dtype, "digest": f"0x{d.total:016x}", "elements": d.elements}
            for name, d in self.tensors.items()
        }

    @property
    def sha256(self) -> str:
        """The weight version: 64 hex digits over the whole manifest."""
        return sha256_hex(self.data())

    @classmethod
    def from_data(cls, data) -> Manifest:
        """Inverse of :meth:`data`, of a JSON text or its value.

        Raises:
            ContractError: it is no manifest.
        """
        data = parse_json(data, "the manifest") if isinstance(data, str) else data
        if not isinstance(data, dict):
            raise ContractError(f"the manifest: expected an object, found {shown(data)}")
        tensors = {}
        for name, entry in data.items():
            try:
                shape, dtype, total, elements = (entry[key] for key in ("shape", "dtype", "digest", "elements"))
                fits = all(type(n) is int and 0 <= n < _WORD for n in (*shape, elements)) and isinstance(dtype, str) and len(total) == 18
                digest = TensorDigest(tuple(shape), dtype, int(total, 16), elements) if fits else None
            except (KeyError, TypeError, ValueError):
                digest = None
            if digest is None:
                raise ContractError(f"the manifest: {shown(name)}: expected shape, dtype, digest and elements, found {shown(entry)}")
            tensors[name] = digest
        return cls(tensors)


def differing(expected: Manifest, found: Manifest) -> list[str]:
    """Names of the tensors that only one manifest has, or that differ in shape, dtype or bits."""
    names = sorted(expected.tensors.keys() | found.tensors.keys())
    return [name for name in names if expected.tensors.get(name) != found.tensors.get(name)]


def check_synced(expected: Manifest, found: Manifest, *, source: str = "trainer", target: str = "engine") -> None:
    """Refuse an engine whose weights are not the trainer's.

    Args:
        expected: of the source of the weights.
        found: of the target after the sync.
        source, target: what to call them.

    Raises:
        ContractError: names the first tensor that differs, both values and what to do.
    """
    wrong = differing(expected, found)
    if not wrong:
        return
    name = wrong[0]
    sides = [(side, m.tensors.get(name)) for side, m in ((source, expected), (target, found))]
    values = ", ".join(f"{side} has {_describe(digest)}" for side, digest in sides)
    raise ContractError(
        f"weights.{name}: {values}; {len(wrong)} of {len(expected.tensors)} tensors differ: sync again, and sample nothing before the "
        "manifests agree"
    )


def check_dtypes(contract: ExecutionContract, manifest: Manifest, *, holder: str = "") -> None:
    """Refuse a parameter or buffer whose dtype is not the contract's: a cast on one side is a rounding that the other side lacks.

    Args:
        contract: of the process.
        manifest: of its weights.
        holder: name of the process, for the message.

    Raises:
        ContractError: names the tensor, its dtype and the contract's.
    """
    rules = dict(contract.dtypes)
    for name, digest in manifest.tensors.items():
        expected = rules.get(name.rpartition(".")[2], rules["*"])
        if digest.dtype != expected:
            raise ContractError(
                f"weights.{name}: dtype: the contract says {expected}, {f'{holder} has' if holder else 'found'} {digest.dtype}; load it as "
                f"{expected}, and never cast it on the way"
            )


def _describe(digest: TensorDigest | None) -> str:
    return "no such tensor" if digest is None else f"{digest.dtype}{list(digest.shape)} 0x{digest.total:016x}"
