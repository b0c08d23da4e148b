"""Where the logprob path begins and ends, whose call site is named, and which kernels are seen past the dispatcher."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from isoexec.contract import ContractError
from isoexec.ops import logprob, matmul
from isoexec.ops._core import registry
from isoexec.verify.audit import launches
from isoexec.verify.audit.recorder import Recorder

SIZES = {"vocab_size": 64, "vocab_block": 64}
X, W = torch.randn(4, 32).bfloat16(), torch.randn(64, 32).bfloat16()
TOKENS = torch.tensor([1, 2, 3, 4])


@pytest.fixture
def recorder():
    return Recorder(lambda: "engine_prefill")


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    [number] = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return number


def test_case_layer_and_call_site(recorder):
    with recorder.observing(), registry.executing("engine_decode"):
        matmul.linear(X, W)
        with registry.in_layer(5):
            F.silu(F.linear(X, W))  # native
    found = {stray.op: stray for stray in recorder.strays}
    assert set(found) == {"aten.mm.default", "aten.silu.default"}
    for stray in found.values():
        assert (stray.case, stray.layer, stray.line) == ("engine_decode", 5, line_of("native"))
        assert Path(stray.file).name == Path(__file__).name
        assert (stray.function, stray.dtypes) == ("test_case_layer_and_call_site", "bfloat16 -> bfloat16")
    assert recorder.inside["engine_decode"]


def test_nothing_is_seen_outside_the_block(recorder):
    X * 2
    with recorder.observing():
        pass
    X * 2
    assert not recorder.strays


def test_an_op_may_leave_a_tensor_of_a_list_undefined(recorder):
    """As FlashAttention 3 does; torch makes None of it, and takes no None back from a mode."""

    class Undefining(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return recorder.__torch_dispatch__(lambda *given, **named: [*func(*given, **named), None], types, args, kwargs)

    with Undefining():
        first, second, undefined = X.split(2)
    assert torch.equal(torch.cat((first, second)), X) and undefined.numel() == 0


def test_repeated_calls_are_counted(recorder):
    with recorder.observing():
        for _ in range(3):
            X * 2
    assert list(recorder.strays.values()) == [3]


def logprobs_of(weight):
    logits = matmul.lm_head(X, weight)
    return logprob.token_logprob(logits, TOKENS, **SIZES)


class Checkpointed(torch.autograd.Function):
    """As a framework's activation recomputation: the first pass without gradients, the second inside backward."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), registry.executing("trainer_recompute"):
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def test_backward_is_beyond_the_path_and_recomputation_on_it(recorder):
    weight = W.clone().requires_grad_()

    def scaled(w):
        return w * 1.0 if registry.current_case() == "trainer_recompute" else w.clone()  # recomputed otherwise

    with recorder.observing(), registry.executing("trainer_forward"):
        found = logprobs_of(Checkpointed.apply(scaled, weight))
        with registry.beyond_logprob():
            loss = found.sum()
        loss /= 2  # what a schedule does to a loss
        loss.backward()
        weight.grad.mul_(0.5)
    [stray] = recorder.strays
    assert (stray.case, stray.op, stray.line) == ("trainer_recompute", "aten.mul.Tensor", line_of("recomputed otherwise"))
    assert recorder.inside.keys() == {"trainer_forward"}


def test_a_loss_that_is_not_declared_is_reported(recorder):
    with recorder.observing():
        logprobs_of(W).sum()
    assert [stray.op for stray in recorder.strays] == ["aten.sum.default"]


def test_what_lies_beyond_may_not_return(recorder):
    with recorder.observing():
        with registry.beyond_logprob():
            scaled = W * 2
        logprobs_of(scaled)
    assert {(stray.op, stray.kind) for stray in recorder.strays} == {("matmul.lm_head", "re-entry")}


def test_finished_logprobs_may_be_read_but_not_changed(recorder):
    with recorder.observing():
        rows = logprob.log_softmax(matmul.lm_head(X, W), **SIZES)
        chosen = rows.gather(1, TOKENS[:, None])
        (rows >= chosen).sum(-1)  # ranks
        torch.cat([chosen, rows.topk(2).values], 1).argmax(-1)
        assert not recorder.strays
        changed = chosen * 1.0
        (rows >= changed).sum(-1)  # named once, at its origin
    [stray] = recorder.strays
    assert (stray.op, stray.kind) == ("aten.mul.Tensor", "arithmetic")


def test_a_result_comes_from_a_logprob_op(recorder):
    with recorder.observing():
        found = logprobs_of(W)
        recorder.expect_logprob(found[1:].detach().clone())
        assert not recorder.strays
        with registry.beyond_logprob():
            loss = found.sum()
        recorder.expect_logprob(found * 0 + loss)  # blended
        recorder.expect_logprob(torch.from_numpy(found.numpy().copy()))  # unseen
    assert {(s.op, s.kind, s.line) for s in recorder.strays if s.kind == "origin"} == {
        ("result", "origin", line_of("blended")), ("result", "origin", line_of("unseen")),
    }  # fmt: skip


def test_logits_may_not_be_read(recorder):
    with recorder.observing():
        logits = matmul.lm_head(X, W)
        logits.argmax(-1)
    assert [stray.kind for stray in recorder.strays] == ["decision"]


def test_no_bit_moves(recorder):
    expected = logprobs_of(W)
    with recorder.observing():
        found = logprobs_of(W)
    assert expected.view(torch.int32).tolist() == found.view(torch.int32).tolist()


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def launch(name):
    """What a compiled kernel's launcher does first, with the metadata that Triton gives it."""
    from triton import knobs
    from triton.compiler.compiler import LazyDict

    knobs.runtime.launch_enter_hook(LazyDict({"name": name, "function": 0, "stream": 0}))


def launching(x, name):
    launch(name)


#: Also under the names that a profile gives to providers' kernels and to copies.
STRAY_KERNELS = ("stray", "FlashAttnFwd", "Memcpy", "fused_batch_memcpy_kernel")


@needs_triton
def test_triton_launches(recorder):
    probe = registry.op("test.launching", cpu=f"{__name__}:launching")(lambda x, name: None)
    try:
        with recorder.observing(), registry.executing("engine_decode"), registry.in_layer(1):
            probe(X, "ours")
            with registry.beyond_logprob():
                launch("loss")
            launch("_zero_kv_blocks_kernel")  # vLLM's, in the allow-list
            for name in STRAY_KERNELS:
                launch(name)
        launch("later")
    finally:
        registry._declared.pop("test.launching")
    found = {(stray.case, stray.layer, stray.op, stray.kind, stray.function) for stray in recorder.strays}
    assert found == {("engine_decode", 1, f"triton.{name}", "kernel", "launch") for name in STRAY_KERNELS}


@needs_triton
def test_interpreted_kernels_are_refused(recorder, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ContractError, match="TRITON_INTERPRET: expected unset"), recorder.observing():
        pass


def test_kernels_of_a_profile():
    ours = launches.triton_kernels()
    assert len(ours) > 20 and all(name.isidentifier() for name in ours)
    names = [*sorted(ours)[:2], "void deep_gemm::sm90_bf16_gemm_impl<1>", "void cutlass::device_kernel<flash::FlashAttnFwdSm90<x>>",
             "Memcpy DtoD (Device -> Device)", "Memset (Device)", "ncclDevKernel_AllGather_RING_LL(x)",
             "batch_memcpy_kernel"]  # fmt: skip
    unknown = ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", "fused_kernel", "fused_batch_memcpy_kernel"]
    ran = Counter(names + unknown + ["elementwise", "elementwise"])
    assert launches.unexplained(ran, Counter({"elementwise": 1})) == dict.fromkeys([*unknown, "elementwise"], 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_on_a_gpu(recorder):
    from stray_kernel import double

    x = torch.randn(128, device="cuda")
    with recorder.observing(), registry.executing("engine_decode"):
        double(x)
    assert {(stray.op, Path(stray.file).name) for stray in recorder.strays} >= {("triton.stray_kernel", "stray_kernel.py")}
