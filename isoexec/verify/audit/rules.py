"""What one op does to floating-point numbers, judged from its name, its tensors and their dtypes."""

from __future__ import annotations

import enum

import torch
from torch.utils._pytree import tree_iter


class Kind(enum.Enum):
    """Kinds of ops; docs/audit.md says which may run without an isoexec op."""

    NO_FLOAT = "no floating-point tensor"
    CONSTANT = "constant"
    MOVEMENT = "movement"
    DECISION = "decision"
    CAST = "cast"
    ARITHMETIC = "arithmetic"


#: Make a tensor of one value, or none at all.
_CONSTANTS = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros zero ones ones_like new_ones "
    "full full_like new_full scalar_tensor eye _efficientzerotensor".split()
)
#: Move values between places, beside every view. Where values have another dtype afterwards it is a cast.
_MOVES = frozenset(
    "clone copy _to_copy _foreach_copy _copy_from fill contiguous cat stack where masked_fill masked_select masked_scatter constant_pad_nd "
    "tril triu roll flip repeat _unsafe_view _reshape_alias lift lift_fresh detach set resize resize_as pin_memory _pin_memory "
    "record_stream slice_scatter select_scatter diagonal_scatter as_strided_scatter "
    "index _unsafe_index index_select gather take embedding index_copy "
    "index_put _index_put_impl _unsafe_index_put scatter t transpose squeeze unsqueeze as_strided swapaxes swapdims".split()
)
#: Of those, the ones whose integer tensors are places, not values.
_INDEXED = frozenset(
    "masked_fill masked_select masked_scatter index _unsafe_index index_select gather take embedding index_copy index_put _index_put_impl "
    "_unsafe_index_put scatter".split()
)
#: A constant that is selected arrives as a zero-dimensional tensor of torch's default dtype.
_TAKES_CONSTANT = frozenset("where masked_fill index_put _index_put_impl".split())
#: Lazy arithmetic that calls itself a view.
_LAZY = frozenset("_conj conj _neg_view _conj_physical".split())
#: Ask for what no value decides.
_METADATA = frozenset(
    "size stride numel storage_offset sym_size sym_stride sym_numel sym_storage_offset dim is_pinned is_contiguous is_same_size device "
    "layout is_non_overlapping_and_dense _has_same_storage_numel result_type can_cast".split()
)
#: Return values of their input, in an order that those values decide.
_SELECTIONS = frozenset("topk sort msort max min kthvalue mode aminmax cummax cummin amax amin median".split())
#: Collectives that move bytes; the others add.
_TRANSPORTS = frozenset(
    "allgather _allgather_base allgather_coalesced allgather_into_tensor_coalesced all_gather_into_tensor all_gather_into_tensor_out "
    "all_gather_into_tensor_coalesced broadcast alltoall alltoall_base all_to_all_single send recv recv_any_source gather scatter barrier "
    "wait_tensor".split()
)


def tensors(*trees) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    return [leaf for tree in trees for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def is_float(x: torch.Tensor) -> bool:
    """Floating point or complex."""
    return x.is_floating_point() or x.is_complex()


def name_of(func) -> str:
    """Name of an overload without namespace and without the underscore of an in-place form."""
    name = func._schema.name.partition("::")[2]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def kind_of(func, args, kwargs, result) -> Kind:
    """Judge a call of the overload ``func`` that returned ``result``."""
    if not isinstance(func, torch._ops.OpOverload):
        return Kind.ARITHMETIC  # a higher-order op runs code of its own
    given, returned = tensors(args, kwargs), tensors(result)
    if not any(map(is_float, given)) and not any(map(is_float, returned)):
        return Kind.NO_FLOAT
    name = name_of(func)
    if func.namespace in ("c10d", "_c10d_functional"):
        return Kind.MOVEMENT if name in _TRANSPORTS else Kind.ARITHMETIC
    if func.namespace not in ("aten", "prim", "prims"):
        return Kind.ARITHMETIC  # a custom op may do anything
    if name in _METADATA:
        return Kind.NO_FLOAT
    if name in _CONSTANTS or (name == "fill" and func._overloadname == "Scalar"):
        return Kind.CONSTANT
    if _moves(func, name, args, kwargs):
        if len(_value_dtypes(name, args, given, returned)) == 1:
            return Kind.MOVEMENT
        return Kind.CAST if any(map(is_float, returned)) else Kind.DECISION
    if name in _SELECTIONS or not any(map(is_float, returned)):
        return Kind.DECISION
    return Kind.ARITHMETIC


def is_composite(func) -> bool:
    """Whether an op is defined by other ops, which are judged instead, and is no view. Without autograd it reaches a mode whole."""
    return isinstance(func, torch._ops.OpOverload) and func.namespace == "aten" and not func.is_view and func._can_decompose()


def rewrites_values(func) -> bool:
    """Whether an in-place op changes the values of its tensor, not only its shape."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return func._schema.is_mutable and name_of(func) not in {"detach", "t", "transpose", "squeeze", "unsqueeze", "as_strided", "set"}


def _moves(func, name: str, args, kwargs) -> bool:
    if name in _LAZY:
        return False
    if name.startswith(("index_put", "_index_put_impl", "_unsafe_index_put")):
        return not (kwargs.get("accumulate") or (len(args) > 3 and args[3]))
    if name == "scatter":
        return "reduce" not in func._overloadname
    return func.is_view or name in _MOVES or name.endswith("_copy")


def _value_dtypes(name: str, args, given: list[torch.Tensor], returned: list[torch.Tensor]) -> set[torch.dtype]:
    """dtypes of the values that an op moves: one, unless it casts."""
    if name in _INDEXED:
        given = list(filter(is_float, given))
    elif name == "where":
        given = tensors(args[1:])
    if name in _TAKES_CONSTANT:
        given = [x for x in given if x.dim()] or given
    return {x.dtype for x in (*given, *returned)}
