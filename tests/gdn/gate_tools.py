"""What the gates of the GPU backend share: inputs, other launch configurations, poisoned memory, captured graphs."""

from __future__ import annotations

import contextlib

import torch

from isoexec.ops import gdn
from isoexec.ops._core.bits import bit_equal
from isoexec.ops.gdn import launch
from tests.gdn.cases import Engine, dirty_pool, inputs

SHAPE = dict(H=4, HV=8, K=128, V=128)
HEADS = tuple(SHAPE.values())
LENGTHS = [130, 1, 257, 0, 64, 15, 384]


def make(lengths, **kw):
    return inputs(lengths, **{**SHAPE, **kw}, device="cuda")


def pool(form, slots, chunk, **kw):
    return dirty_pool(slots, **{**SHAPE, **kw}, chunk=chunk, device="cuda", kind=gdn.POOLS[form])


def engine(form, x, lengths, chunk, slots=None, **kw):
    """Over a pool of NaN bits; by default sequence n lies in slot n."""
    slots = list(range(len(lengths))) if slots is None else slots
    return Engine(x, lengths, pool(form, max(slots, default=0) + 2, chunk, **kw), slots, form)


def whole(form, x, lengths, chunk):
    """Prefilled in one piece."""
    run = engine(form, x, lengths, chunk)
    run.prefill(dict(enumerate(lengths)))
    return run


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@contextlib.contextmanager
def entries(kernel, chunk, **values):
    """Another launch configuration for the duration of a gate; ``chunk`` None: of a kernel that C does not matter to."""
    table, key = launch.TABLE[kernel], "any" if chunk is None else str(chunk)
    table[key], saved = values, table[key]
    try:
        yield
    finally:
        table[key] = saved


@contextlib.contextmanager
def poisoned():
    """Every tensor that is allocated and not written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert bool(torch.empty(64, device="cuda").isnan().all()), "torch does not fill memory here"
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def captured(fn):
    """``fn`` in a CUDA graph, compiled before -> (graph, what it returned)."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn()
    return graph, out


def launched(fn, warm=True) -> list[str]:
    """Names of what ``fn`` puts on the GPU: kernels, copies, fills. ``warm``: called once before, to compile."""
    if warm:
        fn()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        fn()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@contextlib.contextmanager
def no_host_sync():
    """torch refuses whatever would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same_state(a, b) -> bool:
    return all(bit_equal(x, y) for x, y in zip(a, b))


def stepped(lengths, count):
    """Rows of token ``count`` of equally long sequences."""
    return torch.arange(len(lengths), device="cuda") * lengths[0] + count


def raises(kind, fn) -> bool:
    try:
        fn()
    except kind:
        return True
    return False
