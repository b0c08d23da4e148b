"""One arm from plan to verdict, with workers that answer from a formula."""

import dataclasses
import time

import pytest
from fakes import FakeEngine, FakeTrainer

from isoexec.contract import ContractError, ExecutionContract
from isoexec.verify.arm import ArmRun, ModelUnderTest
from isoexec.verify.accuracy import LEAST_TOKENS, Accuracy
from isoexec.verify.progress import Progress
from isoexec.verify.protocol import OperationFailed, WorkerError, WorkerGroup, WorkerRefused
from isoexec.verify.report import table
from isoexec.verify.settings import full_plan, quick_plan
from isoexec.verify.verdict import DIFFERENT, EQUAL, INCONCLUSIVE, Verdict, add_changed_logprobs


def short(plan):
    """The plan with four new tokens for each prompt."""
    engines = tuple(
        dataclasses.replace(
            run, **{part: tuple(dataclasses.replace(s, max_tokens=4) for s in getattr(run, part)) for part in ("before", "after_sync")}
        )
        for run in plan.engines
    )
    return dataclasses.replace(plan, engines=engines)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    contract = tmp_path / "contract.json"
    contract.write_text(ExecutionContract("Qwen3ForCausalLM", "cpu").to_json())
    return ModelUnderTest("model", folder, folder, tmp_path / "planted", 512, contract)


def run_arm(model, tmp_path, *, arm="isoexec", plan=None, engine=None, trainer=None):
    workers = (engine or FakeEngine(), trainer or FakeTrainer())
    plan = short(plan or quick_plan())
    group = WorkerGroup(tmp_path)
    run = ArmRun(arm, model, plan, workers, group, tmp_path, Progress(open("/dev/null", "w")), timeout=5)
    comparisons = run.run()
    add_changed_logprobs(run.samples)
    return run, comparisons


def judge(run, comparisons, errors=None, control=None):
    verdict = Verdict()
    verdict.judge_model(run.model, comparisons, {run.arm: run.samples}, errors, control or run.control())
    return verdict


@pytest.mark.parametrize("plan", [quick_plan(), full_plan()], ids=["quick", "full"])
def test_equal_sides_pass_every_setting(model, tmp_path, plan):
    run, comparisons = run_arm(model, tmp_path, plan=plan)
    assert [s.setting.name for s in run.samples] and {s.setting.name for s in run.samples} == set(plan.names)
    assert len(comparisons) == sum(len(s.setting.scorings) for s in run.samples)
    assert all(c.passed for c in comparisons)
    verdict = judge(run, comparisons)
    assert (verdict.status, verdict.lines()) == (EQUAL, [])


def test_the_native_arm_scores_once_in_the_quick_plan(model, tmp_path):
    trainer = FakeTrainer()
    run, comparisons = run_arm(model, tmp_path, arm="native", trainer=trainer)
    assert len(comparisons) == len(run.samples)
    packings = [arguments["packing"] for name, arguments in trainer.calls if name == "score"]
    assert all(len(group) == 1 for packing in packings for group in packing)
    run, comparisons = run_arm(model, tmp_path / "full", arm="native", plan=full_plan())
    assert len(comparisons) == 3 * len(run.samples)


def test_each_side_sees_its_contract(model, tmp_path):
    for arm, expected in (("isoexec", str(model.contract)), ("native", None)):
        engine, trainer = FakeEngine(), FakeTrainer()
        run_arm(model, tmp_path / arm, arm=arm, engine=engine, trainer=trainer)
        opened = [arguments for worker in (engine, trainer) for name, arguments in worker.calls if name == "open"]
        assert {arguments["contract"] for arguments in opened} == {expected}


def test_the_weights_move_after_all_first_scores(model, tmp_path):
    trainer = FakeTrainer()
    run, _ = run_arm(model, tmp_path, trainer=trainer)
    operations = [name for name, _ in trainer.calls]
    first = sum(len(s.setting.scorings) for s in run.samples if s.weights == "first")
    assert operations[: operations.index("step")].count("score") == first
    assert operations.count("step") == 1


def test_a_difference_at_one_temperature_is_found(model, tmp_path):
    engine = FakeEngine(shift=lambda prompt, temperature: 2.0**-15 if temperature != 1 and len(prompt) == 64 else 0.0)
    run, comparisons = run_arm(model, tmp_path, engine=engine)
    failed = [c.setting for c in comparisons if not c.passed]
    assert failed and all("T=0.7" in name for name in failed)
    verdict = judge(run, comparisons)
    assert verdict.status == DIFFERENT
    assert any("1 of" in line and "T=0.7" in line for line in verdict.differences)


def test_stale_weights_are_found(model, tmp_path):
    """By the tokens, too, if the manifests were blind."""
    run, comparisons = run_arm(model, tmp_path, engine=FakeEngine(holds="any"), trainer=FakeTrainer(stale=True, holds="any"))
    assert {c.setting.split(" / ")[0] for c in comparisons if not c.passed} == {"after sync", "after sync, warm, T=0.7"}
    assert judge(run, comparisons).status == DIFFERENT


def names(worker):
    return [name for name, _ in worker.calls]


def test_what_was_agreed_on(model, tmp_path):
    engine, trainer = FakeEngine(), FakeTrainer()
    run, _ = run_arm(model, tmp_path, plan=full_plan(), engine=engine, trainer=trainer)
    syncs, opens = names(engine).count("sync"), names(engine).count("open")
    assert run.agreement.record["handshakes"] == opens + syncs and names(trainer).count("identity") == 1 + syncs
    for i, name in enumerate(names(engine)):
        if name == "sync":
            assert (names(engine)[i - 1], names(engine)[i + 1]) == ("identity", "weights")
    weights = run.agreement.record["weights"]
    assert [w["when"] == "opened" for w in weights] == [True] + [False] * syncs and len({w["version"] for w in weights}) == 2
    assert set(run.agreement.record["op_calls"]) == {
        "trainer_forward", "trainer_recompute", "trainer_score", "engine_prefill", "engine_decode"
    }  # fmt: skip


def test_the_native_arm_agrees_on_nothing(model, tmp_path):
    engine = FakeEngine()
    run, _ = run_arm(model, tmp_path, arm="native", engine=engine)
    assert run.agreement is None and not {"identity", "weights", "served"} & set(names(engine))


def test_processes_that_differ_are_refused_before_a_token_is_sampled(model, tmp_path):
    engine = FakeEngine(policy={"packages": {"torch": "2.11.0"}})
    with pytest.raises(ContractError, match='packages.torch: trainer has "2.10.0", engine has "2.11.0"'):
        run_arm(model, tmp_path, engine=engine, trainer=FakeTrainer(policy={"packages": {"torch": "2.10.0"}}))
    assert "generate" not in names(engine)


def test_a_process_that_changes_is_refused_before_the_sync(model, tmp_path):
    class Changing(FakeTrainer):
        def step(self, **arguments):
            self.behaviour["policy"] = {"math": {"threads": "2"}}
            return super().step(**arguments)

    engine = FakeEngine(policy={"math": {"threads": "1"}})
    with pytest.raises(ContractError, match='math.threads: trainer has "2", engine has "1"'):
        run_arm(model, tmp_path, engine=engine, trainer=Changing(policy={"math": {"threads": "1"}}))
    assert "generate" in names(engine) and "sync" not in names(engine)


def test_an_engine_that_kept_old_weights_is_refused_before_it_samples(model, tmp_path):
    class Keeping(FakeEngine):
        def sync(self, weights):
            pass

    engine = Keeping()
    with pytest.raises(ContractError, match="weights.w: trainer has bfloat16.*, engine has .*sync again"):
        run_arm(model, tmp_path, engine=engine)
    assert "generate" not in names(engine)[names(engine).index("sync") :]


def test_an_op_that_nobody_served_is_refused(model, tmp_path):
    with pytest.raises(ContractError, match="op attention.paged, case engine_prefill: declared for region attention, and never called"):
        run_arm(model, tmp_path, engine=FakeEngine(unserved=["attention.paged"]))


def test_a_case_that_did_not_happen_is_refused(model, tmp_path):
    class Unattributed(FakeTrainer):
        CASES = ("trainer_forward", "trainer_score")

    with pytest.raises(ContractError, match="case trainer_recompute: no op was served in it"):
        run_arm(model, tmp_path, trainer=Unattributed())


def test_settings_that_disagree_with_each_other_are_found(model, tmp_path):
    run, comparisons = run_arm(model, tmp_path)
    sample = run.samples[3]
    sample.tokens[5] = [t + 1 for t in sample.tokens[5]]
    verdict = judge(run, comparisons)
    assert verdict.status == DIFFERENT and "leaves" in verdict.differences[0]


@pytest.mark.parametrize("key", ["preemptions", "cached_tokens", "chunked_prompts"])
def test_a_setting_that_did_not_happen_is_inconclusive(model, tmp_path, key):
    evidence = {"block_tokens": 32, "preemptions": 3, "cached_tokens": 5, "chunked_prompts": 2, key: 0}
    run, comparisons = run_arm(model, tmp_path, engine=FakeEngine(evidence=evidence))
    verdict = judge(run, comparisons)
    assert verdict.status == INCONCLUSIVE and verdict.inconclusive


def test_a_block_that_no_prompt_fills_caches_nothing(model, tmp_path):
    """A hybrid of real size; what cannot happen is said, and does not make a run inconclusive."""
    evidence = {"block_tokens": 1152, "preemptions": 3, "cached_tokens": 0, "chunked_prompts": 2}
    run, comparisons = run_arm(model, tmp_path, engine=FakeEngine(evidence=evidence))
    verdict = judge(run, comparisons)
    assert verdict.status == EQUAL and "a block is 1152 tokens" in verdict.warnings[0]


def test_an_optimizer_step_that_changes_nothing_is_inconclusive(model, tmp_path):
    class Unmoved(FakeEngine):
        def sync(self, weights):
            pass

    run, comparisons = run_arm(model, tmp_path, engine=Unmoved(), trainer=FakeTrainer(stale=True))
    verdict = judge(run, comparisons)
    assert verdict.status == INCONCLUSIVE and "optimizer step" in verdict.inconclusive[0]


def test_rows_that_were_not_compared_are_inconclusive(model, tmp_path):
    run, comparisons = run_arm(model, tmp_path, trainer=FakeTrainer(rows=False))
    assert judge(run, comparisons).status == INCONCLUSIVE


def test_a_control_that_does_not_differ_is_inconclusive(model, tmp_path):
    run, comparisons = run_arm(model, tmp_path)
    assert run.control().bit_equal < 1
    verdict = judge(run, comparisons, control=comparisons[0])
    assert verdict.status == INCONCLUSIVE and "blind" in verdict.inconclusive[0]


def test_equal_native_arm_is_a_warning(model, tmp_path):
    run, comparisons = run_arm(model, tmp_path, arm="native")
    verdict = judge(run, comparisons)
    assert verdict.status == EQUAL and "blind" in verdict.warnings[0]


def test_consistent_but_wrong_is_no_pass(model, tmp_path):
    run, comparisons = run_arm(model, tmp_path)
    assert judge(run, comparisons, Accuracy(LEAST_TOKENS, isoexec=1e-2, native=1e-2)).status == EQUAL
    assert judge(run, comparisons, Accuracy(LEAST_TOKENS, isoexec=1.2e-2, native=1e-2)).status == DIFFERENT
    few = judge(run, comparisons, Accuracy(9, isoexec=1.2e-2, native=1e-2))
    assert few.status == EQUAL and "not judged" in few.warnings[0]


def test_a_trainer_scores_what_another_arm_sampled(model, tmp_path):
    run, _ = run_arm(model, tmp_path)
    other, _ = run_arm(model, tmp_path / "native", arm="native")
    sample = run.samples[0]
    assert other.score_others(model.folder, sample.sequences(), sample.setting.temperature) == [s.logprobs for s in sample.engine]


def test_a_failing_trainer_ends_the_arm(model, tmp_path):
    class Failing(FakeTrainer):
        def score(self, **_):
            raise WorkerError("trainer-isoexec: died in 'score'; log: x")

    with pytest.raises(WorkerError, match="died in 'score'"):
        run_arm(model, tmp_path, trainer=Failing())


class Failing(FakeEngine):
    """Raises in the second setting."""

    def generate(self, *args, **kwargs):
        if sum(operation == "generate" for operation, _ in self.calls) > 1:
            raise self.behaviour["error"]
        return super().generate(*args, **kwargs)


def test_a_native_arm_that_cannot_go_on_says_so_and_keeps_what_it_has(model, tmp_path):
    class Slow(FakeTrainer):
        """Has what was sampled still to score when the engine fails, the checkpoint still to open."""

        def open(self, *args, **kwargs):
            time.sleep(0.2)
            return super().open(*args, **kwargs)

    run, comparisons = run_arm(model, tmp_path, arm="native", engine=Failing(error=OperationFailed("no such kernel")), trainer=Slow())
    assert run.unable == "no such kernel" and len(run.samples) == 1
    ran = [c for c in comparisons if not c.not_run]
    assert [c.setting for c in ran] == ["one at a time / score"]
    others = comparisons[len(ran) :]
    assert others and all((c.not_run, c.tokens, c.passed) == ("no such kernel", 0, False) for c in others)
    assert others[0].as_run() | {"setting": ""} == {
        "model": "model", "arm": "native", "setting": "", "tokens": 0, "mean_abs": None, "max_abs": None, "std_abs": None,
        "bit_equal": None, "rows_equal": None, "not_run": "no such kernel",
    }  # fmt: skip
    assert "not run  " in table([c.as_run() for c in others])


@pytest.mark.parametrize(
    ("arm", "error"), [("isoexec", OperationFailed), ("native", WorkerError), ("native", WorkerRefused)], ids=["isoexec", "died", "refused"]
)
def test_other_failures_stop_the_run(model, tmp_path, arm, error):
    with pytest.raises(error):
        run_arm(model, tmp_path, arm=arm, engine=Failing(error=error("gone")))
