"""What a captured pass of the engine leaves to its replays, as far as a CPU can show it: no graph runs here."""

from collections import Counter

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import matmul, norm
from isoexec.ops._core import registry
from isoexec.ops._trace.recorder import Recorder
from isoexec.runtimes.vllm import graphs, step

X, W, PRODUCT = torch.randn(4, 16).bfloat16(), torch.ones(16).bfloat16(), torch.randn(16, 16).bfloat16()


class Rows:
    """What the engine says of a batch of three in a graph of four."""

    def tokens(self):
        return torch.arange(3), torch.full((3,), 9)

    def sampled(self):
        return self.tokens()

    def done(self):
        pass


def forward():
    with registry.executing(step.begin(1)):
        with registry.in_layer(0):
            y = matmul.linear(norm.rms_norm(X, W, 1e-6), PRODUCT)
        return norm.rms_norm(y, W, 1e-6)


def test_a_replay_counts_the_ops_of_its_pass_and_is_a_decode_step():
    _, done = graphs.capture(forward, 4)
    step.begin(7)
    before = Counter(registry.served())
    graphs.replayed(done)
    assert Counter(registry.served()) - before == done.calls and sum(done.calls.values()) == 3
    assert {case for _, case, _ in done.calls} == {"engine_decode"} and step.current() == "engine_decode"


def test_what_the_pass_records_is_the_batchs():
    recorder = Recorder("ops")
    with registry.observing(recorder):
        y, done = graphs.capture(forward, 4)
        with step.observed(Rows()):
            graphs.replayed(done)
            step.begin_head()
            with step.executing():
                matmul.lm_head(y[:3], PRODUCT)
            step.end()
    streams = {(s["layer"], s["stage"]): s for s in recorder.finish()["streams"]}
    assert {stage for _, stage in streams} == {"norm.rms_norm", "matmul.linear", "matmul.lm_head"}
    for stream in streams.values():
        assert torch.frombuffer(bytearray(stream["sequence"]), dtype=torch.int32).tolist() == [0, 1, 2]


def test_a_graph_of_another_recording_is_refused():
    _, done = graphs.capture(forward, 4)
    with registry.observing(Recorder("ops")), step.observed(Rows()):
        with pytest.raises(ContractError, match="captured for this recording"):
            graphs.replayed(done)
