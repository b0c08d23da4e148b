"""A decode step of a whole layer, every op of it: no host read, and a replayed CUDA graph gives the bits of the step."""

import pytest
import torch

from isoexec.contract import Numerics
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge


@pytest.mark.parametrize("leaves", [1, 8])
@pytest.mark.parametrize("kind", ["GDN", "attention"])
def test_a_decoding_layer_is_captured(hardware, kind, leaves):
    from bench import layers

    torch.manual_seed(1)
    stage, layer = layers.Stage(kind, "decode"), layers.parameters(kind)
    step = stage.ours(layer, Numerics(row_leaves=leaves))
    inputs = [layers.randn(stage.rows, layers.D) for _ in range(2)]

    def fresh():
        if kind == "GDN":
            for state in (stage.windows, *stage.pool.tensors()):
                state.zero_()

    with torch.no_grad():
        want = step(*inputs)
        fresh()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = step(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        fresh()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            got = step(*inputs)
        fresh()
        graph.replay()
    for name, first, second, third in zip(("x", "residual"), want, again, got):
        assert first.isfinite().all() and first.any()
        assert_bit_equal(second, first, f"{name} of a second step")
        assert_bit_equal(third, first, f"{name}, replayed")
    inputs[0].copy_(nudge(inputs[0], 5, 64))
    fresh()
    graph.replay()
    assert not bit_equal(got[0], want[0])
