"""`isoexec verify` traces its first mismatch by itself."""

import json

import pytest

from isoexec.verify.arm import ArmRun, ModelUnderTest
from isoexec.verify.plant import PLANTED_WEIGHT, plant_ulp
from isoexec.verify.progress import Progress
from isoexec.verify.protocol import OperationFailed, WorkerGroup
from isoexec.verify.settings import WHOLE, EngineRun, Plan, Setting
from isoexec.verify.trace.mismatch import Mismatch, trace_mismatch
from isoexec.verify.trace.report import open_report
from isoexec.verify.trace.run import Traced

TIMEOUT = 540


@pytest.fixture
def arm(pair, tmp_path):
    """An arm on the session's processes; they have their own model again afterwards."""
    planted = tmp_path / "planted"
    plant_ulp(pair.model, planted)
    plan = Plan(engines=(EngineRun(WHOLE, before=(Setting("together", max_tokens=4, permuted=True),)),), prompt_count=6)

    def make(trainer_folder):
        model = ModelUnderTest("model", pair.model, trainer_folder, planted, 512, pair.contract)
        group = WorkerGroup(tmp_path)
        return ArmRun(
            "isoexec", model, plan, (pair.engine, pair.trainer), group, tmp_path, Progress(open("/dev/null", "w")), TIMEOUT, tmp_path
        )

    yield make, planted
    pair.open()


def test_a_planted_ulp_is_traced_to_its_weight(arm, pair, tmp_path):
    make, planted = arm
    run = make(planted)
    [comparison] = run.run()
    assert not comparison.passed
    found = run.traceback
    assert found.file == tmp_path / "trace-model-together-score.zip"
    told = "\n".join(found.lines())
    assert str(found.file) in told and "different weights" in told and "parameter weight differs" in told, told
    assert f"tensors of the checkpoint that differ: model.{PLANTED_WEIGHT}" in told, told
    first = found.report.compared.first
    assert (first.where.layer, first.where.stage) == (0, "norm.zero_centered_rms_norm") and "input_layernorm" in PLANTED_WEIGHT
    assert found.report.finding.element.differing == 1 and found.report.finding.element.index[-1] == 0  # the first weight of the row
    assert len(found.report.compared.tokens) > 20 and {s for s, _ in found.report.compared.tokens} <= set(range(6))
    assert open_report([found.file]).verdict == "divergent"
    assert json.dumps(found.as_json(), allow_nan=False)


def test_equal_sides_are_not_traced(arm, pair, tmp_path):
    make, _ = arm
    run = make(pair.model)
    [comparison] = run.run()
    assert comparison.passed and run.traceback is None and not list(tmp_path.glob("trace-*"))


def test_a_trace_that_fails_is_told(tmp_path):
    def fails(recording):
        raise OperationFailed("engine: 'generate' failed")

    mismatch = Mismatch("a b/c", [[1]], [[2]], [[1]], [[2]], None, Traced(fails, fails), {})
    found = trace_mismatch(mismatch, tmp_path)
    assert found.lines() == ["the trace of the mismatch failed: engine: 'generate' failed"] and "failed" in found.as_json()["failure"]


def test_sequences_that_differ_in_a_row_alone(tmp_path):
    rows = [["a"], ["b"]], [["a"], ["c"]]
    assert Mismatch("", [], [], [[1], [2]], [[1], [2]], rows, None, {}).different() == [1]
    assert Mismatch("", [], [], [[1], [2]], [[3], [2]], rows, None, {}).different() == [0, 1]
    assert Mismatch("", [], [], [[1], [2]], [[3], [2]], None, None, {}).different() == [0]
