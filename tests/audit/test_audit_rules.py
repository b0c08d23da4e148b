"""What counts as floating-point work and what is allowed without an op, one call at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from isoexec.ops._core import registry
from isoexec.verify.audit.recorder import Recorder

X = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
Y = torch.arange(12, dtype=torch.float32).view(3, 4)
I = torch.tensor([2, 0])  # noqa: E741
C = torch.tensor([[0, 1, 1, 3]] * 3)


def assign(x, *place, value):
    x = x.clone()
    x[place] = value
    return x


ALLOWED = {
    "views": lambda: [X.view(-1), X.t(), X.flatten(), X.unflatten(1, (2, 2)), X[:, 1:], X.chunk(2, -1), X.split([1, 3], -1), X.detach(),
                      X[None].squeeze(0), X.expand(2, 3, 4), X.unbind(0), X.transpose(0, 1), X.narrow(0, 1, 2), X.view_as(X),
                      X.unfold(0, 2, 1)],
    "copies": lambda: [X.clone(), X.t().contiguous(), X.t().reshape(-1), torch.empty_like(X).copy_(X), X.to(torch.bfloat16), X.cpu()],
    "joins": lambda: [torch.cat([X, X]), torch.stack([X, X]), X.repeat(2, 1), X.repeat_interleave(2, 0), F.pad(X, (0, 3))],
    "gathers": lambda: [X[I], X.index_select(0, I), Y.gather(1, C), Y.take_along_dim(C, 1), F.embedding(I, X), Y.masked_select(C > 1)],
    "scatters": lambda: [assign(X, I, value=X[I]), assign(X, 0, value=1.5), X.index_copy(0, I, X[I]), Y.scatter(1, C, Y)],
    "selection": lambda: [torch.where(C > 0, Y, 0.0), torch.where(C > 0, Y, Y), X.masked_fill(C > 0, -torch.inf), Y.tril()],
    "constants": lambda: [torch.zeros(3), torch.ones_like(X), X.new_full((2,), 0.5), torch.full((2,), 0.3), torch.empty(2).fill_(7),
                          X.clone().zero_(), torch.tensor(0.7), torch.tensor([0.1, 0.2])],
    "integers": lambda: [C + C, C.cumsum(0), C > 1, C.sum(), torch.arange(3), torch.bucketize(C, I.sort()[0]), C.to(torch.int32),
                         int(C[0, 1])],
    "metadata": lambda: [X.shape, X.stride(), X.is_contiguous(), X.dim(), X.dtype, torch.result_type(X, Y)],
}  # fmt: skip

COUNTED = {
    "multiply": (lambda: X * 1.0, "aten.mul.Tensor", "arithmetic"),
    "in place": (lambda: X.clone().add_(X), "aten.add_.Tensor", "arithmetic"),
    "linear": (lambda: F.linear(X, X), "aten.mm.default", "arithmetic"),
    "softmax": (lambda: torch.softmax(Y, -1), "aten._softmax.default", "arithmetic"),
    "sum": (lambda: Y.sum(), "aten.sum", "arithmetic"),
    "narrowing": (lambda: Y.bfloat16(), "aten.", "cast"),
    "widening": (lambda: X.float(), "aten.", "cast"),
    "from integers": (lambda: C.float(), "aten.", "cast"),
    "from booleans": (lambda: (C > 1).to(torch.bfloat16), "aten.", "cast"),
    "copy between dtypes": (lambda: torch.empty_like(Y).copy_(X), "aten.copy_.default", "cast"),
    "cat of two dtypes": (lambda: torch.cat([X, Y]), "aten.cat.default", "cast"),
    "selection of two dtypes": (lambda: torch.where(C > 0, X, Y), "aten.where.self", "cast"),
    "division of integers": (lambda: C / C.clamp(min=1), "aten.div.Tensor", "arithmetic"),
    "float range": (lambda: torch.arange(3.0), "aten.arange", "arithmetic"),
    "accumulating scatter": (lambda: Y.clone().index_put_((I,), Y[I], accumulate=True), "aten.index_put_.default", "arithmetic"),
    "scatter_add": (lambda: Y.scatter_add(1, C, Y), "aten.scatter_add.default", "arithmetic"),
    "scatter_reduce": (lambda: Y.clone().scatter_(1, C, 2.0, reduce="multiply"), "aten.scatter_.value_reduce", "arithmetic"),
    "random": (lambda: torch.empty(3).exponential_(), "aten.exponential_.default", "arithmetic"),
    "comparison": (lambda: Y > 1, "aten.gt.Scalar", "decision"),
    "argmax": (lambda: Y.argmax(-1), "aten.argmax.default", "decision"),
    "topk": (lambda: Y.topk(2), "aten.topk.default", "decision"),
    "value in Python": (lambda: Y[0, 0].item(), "aten._local_scalar_dense.default", "decision"),
    "truncation": (lambda: Y.long(), "aten.", "decision"),
    "bits as integers": (lambda: Y.view(torch.int32), "aten.view.dtype", "decision"),
    "bits as floats": (lambda: C.to(torch.int32).view(torch.float32), "aten.view.dtype", "cast"),
    "negated view": (lambda: torch._neg_view(Y), "aten._neg_view.default", "arithmetic"),
    "custom op": (lambda: torch.ops.isoexec_audit_test.double(Y), "isoexec_audit_test.double.default", "arithmetic"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def custom_op():
    library = torch.library.Library("isoexec_audit_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x + x, "CPU")
    yield
    library._destroy()


@pytest.fixture(params=["with autograd", "inference mode"])
def audited(request):
    def run(call):
        recorder = Recorder(lambda: "trainer_score")
        with torch.inference_mode(request.param == "inference mode"), recorder.observing():
            call()
        return recorder

    return run


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_without_an_op(audited, name):
    assert not audited(ALLOWED[name]).strays


@pytest.mark.parametrize("name", COUNTED)
def test_counted(audited, name):
    call, op, kind = COUNTED[name]
    [(stray, count)] = [*audited(call).strays.items()]
    assert count == 1 and stray.op.startswith(op) and stray.kind == kind
    assert (stray.case, stray.layer) == ("trainer_score", None)


def test_the_same_calls_inside_an_op_are_its_own(audited):
    for call, *_ in COUNTED.values():
        probe = registry.op("test.audited", cpu=f"{__name__}:_run")(lambda x, call: None)
        try:
            recorder = audited(lambda: probe(Y, call))
        finally:
            registry._declared.pop("test.audited")
        assert not recorder.strays and recorder.inside["trainer_score"]


def _run(x, call):
    return call()
