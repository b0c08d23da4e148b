"""What ops refuse before anything is computed. Attributes alone are read: no synchronisation, whatever the device."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops._core import registry

#: Dtypes of an operand.
BF16, FP32, IDS = (torch.bfloat16,), (torch.float32,), (torch.int32, torch.int64)


def tensor(op: str, name: str, x, dtypes: tuple[torch.dtype, ...], *shape) -> None:
    """Raises ContractError unless ``x`` is a tensor of one of ``dtypes`` and, where a ``shape`` is given, of that shape.

    Args:
        shape: sizes, or names of sizes that may be any; a leading ``...`` stands for any number of dimensions.
    """
    if not isinstance(x, torch.Tensor):
        found = f"{type(x).__name__} {x!r}"
        raise ContractError(f"op {op}: {name}: expected a tensor of {_names(dtypes)}, found {found}; make it one on the operands' device")
    if x.dtype not in dtypes and not (x.dtype is torch.float32 and torch.bfloat16 in dtypes and registry.is_before_rounding()):
        where = "where it is made" if dtypes is IDS else "where the schedule rounds it"
        raise ContractError(f"op {op}: {name}: expected {_names(dtypes)}, found {x.dtype}; convert it once, {where}")
    if shape and not _fits(x.shape, shape):
        wanted = ", ".join("..." if n is ... else str(n) for n in shape)
        raise ContractError(f"op {op}: {name}: expected shape [{wanted}], found {list(x.shape)}; check what the caller passes")


def _names(dtypes) -> str:
    return " or ".join(map(str, dtypes))


def _fits(found, shape) -> bool:
    if shape[0] is ...:
        shape = shape[1:]
        if len(found) < len(shape):
            return False
        found = found[len(found) - len(shape) :]
    return len(found) == len(shape) and all(isinstance(n, str) or n == m for n, m in zip(shape, found))
