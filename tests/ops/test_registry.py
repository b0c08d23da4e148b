"""Declaration and dispatch of ops."""

import pytest
import torch

from isoexec.contract import CASES, ContractError
from isoexec.ops import activation, attention, collective, embedding, logprob, matmul, norm, rope
from isoexec.ops._core import registry
from op_checks import bf16_values

FAMILIES = (activation, attention, collective, embedding, logprob, matmul, norm, rope)


def test_every_declared_op_of_the_dense_model_has_a_cpu_implementation():
    names = {f.__name__.rsplit(".", 1)[1] for f in FAMILIES}
    declared = {n: d for n, d in registry.declarations().items() if n.split(".")[0] in names}
    assert len(declared) >= 18
    for declaration in declared.values():
        assert callable(declaration.resolve("cpu"))


def test_no_implementation_is_an_error():
    with pytest.raises(ContractError, match="op embedding.embedding: no implementation for device 'meta'"):
        embedding.embedding(torch.zeros(2, dtype=torch.int64, device="meta"), torch.zeros(2, 2))
    with pytest.raises(TypeError, match="without a tensor"):
        norm.rms_norm(None, None, 1e-6)


def test_an_op_is_declared_once():
    with pytest.raises(ValueError, match="declared twice"):
        registry.op("matmul.linear", cpu=".reference:linear")(lambda x: None)


def test_calls_are_counted_by_case():
    x = bf16_values(2, 16).bfloat16()
    key = ("activation.silu_mul", "engine_decode", "isoexec.ops.activation.reference:silu_mul")
    before = registry.served().get(key, 0)
    with registry.executing("engine_decode"):
        assert registry.current_case() == "engine_decode" and registry.current_op() is None
        activation.silu_mul(x)
    assert registry.current_case() is None
    assert registry.served()[key] == before + 1
    with pytest.raises(ContractError, match="unknown case 'decode'"), registry.executing("decode"):
        pass
    assert "engine_decode" in CASES


def test_a_thread_knows_its_layer():
    with registry.in_layer(3):
        with registry.in_layer(4):
            assert registry.current_layer() == 4
        assert registry.current_layer() == 3
    assert registry.current_layer() is None


def marked(x):
    return registry.current_op()


def test_a_thread_knows_the_op_it_is_inside_of():
    probe = registry.op("test.probe", cpu=f"{__name__}:marked")(lambda x: None)
    try:
        assert (registry.current_op(), probe(torch.zeros(1)), registry.current_op()) == (None, "test.probe", None)
    finally:
        registry._declared.pop("test.probe")
