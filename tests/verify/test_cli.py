"""The command line: contracts, and bad input in one line with exit status 2."""

import dataclasses
import fcntl
import json
import subprocess
import sys

import pytest

from isoexec.cli import main
from isoexec.contract import ContractError, ExecutionContract, contract_for_model
from isoexec.verify.compare import Comparison
from isoexec.verify.run import ARMS, _Run, backend, make_options, worker_environment

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def write(folder, weights=True, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (CONFIG | changes).items() if v is not None}))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def test_a_fault_of_ours_is_not_a_verdict(monkeypatch, capsys):
    """Status 1 says that logprobs differ; an exception must not end with it."""

    def broken(options):
        raise AttributeError("planted")

    monkeypatch.setattr("isoexec.cli._verify", broken)
    assert main(["verify"]) == 3
    assert "AttributeError: planted; this is a fault of isoexec" in capsys.readouterr().err


def test_a_built_contract_is_shown(tmp_path, capsys):
    model, file = write(tmp_path / "m"), str(tmp_path / "c.json")
    assert main(["contract", "build", "--model", model, "--backend", "cpu", "-o", file]) == 0
    built = capsys.readouterr().out
    assert main(["contract", "show", file]) == 0
    shown = capsys.readouterr().out
    digest = ExecutionContract.from_json(open(file, encoding="utf-8").read()).digest
    assert digest in built and digest in shown
    assert contract_for_model(model, "cpu").identities["semantic"] in shown


@pytest.mark.parametrize("width, leaves", [(256, 8), (192, 4), (96, 2), (80, 1)])
def test_row_leaves_fit_the_widths(tmp_path, width, leaves):
    file = tmp_path / "c.json"
    assert main(["contract", "build", "--model", write(tmp_path / "m", intermediate_size=width), "--backend", "cpu", "-o", str(file)]) == 0
    assert ExecutionContract.from_json(file.read_text()).numerics.row_leaves == leaves


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: expected one of Qwen3ForCausalLM, "),
        ({"architectures": None}, "architectures: expected one name"),
        ({"weights": False}, "neither model.safetensors nor"),
        ({"max_position_embeddings": 128}, "max_position_embeddings: expected at least 512, found 128"),
        ({"vocab_size": None}, "vocab_size: expected at least"),
        ({"num_attention_heads": "4"}, "num_attention_heads: expected a positive integer, found '4'"),
    ],
)
def test_models_that_cannot_be_verified(tmp_path, capsys, changes, text):
    assert main(["verify", "--model", write(tmp_path / "m", **changes), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert text in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["{}", "not json", '{"architecture": "x", "backend": "tpu"}'])
def test_contracts_that_are_not(tmp_path, capsys, content):
    (tmp_path / "c.json").write_text(content)
    assert main(["contract", "show", str(tmp_path / "c.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_width_that_no_leaf_divides(tmp_path, capsys):
    model = write(tmp_path / "m", intermediate_size=250)
    assert main(["contract", "build", "--model", model, "--backend", "cpu", "-o", str(tmp_path / "c.json")]) == 2
    assert "intermediate_size: 250 is not a multiple of 16" in capsys.readouterr().err
    assert not (tmp_path / "c.json").exists()


def test_a_config_without_end_is_bad_input(tmp_path, capsys):
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert main(["contract", "build", "--model", str(tmp_path), "--backend", "cpu", "-o", str(tmp_path / "c.json")]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err


def test_a_build_for_gpus_is_refused_without_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("isoexec.verify.run.importlib.metadata.version", lambda name: "0.23.0+precompiled")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for verb in (["verify", "--out", str(tmp_path)], ["audit"], ["trace", "run", "--out", str(tmp_path)]):
        assert main(verb) == 2
        assert "holds vLLM 0.23.0+precompiled, which computes on a GPU, and none is visible" in capsys.readouterr().err


BEFORE_TORCH = "import sys; from isoexec.cli import main; status = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(status)"


def told_before_torch(*words):
    """The one line that a command says in a process that has not imported torch when it ends."""
    found = subprocess.run([sys.executable, "-c", BEFORE_TORCH, *words], capture_output=True, text=True)
    assert found.returncode == 2 and found.stderr.count("\n") == 1, found.stderr
    return found.stderr


def test_bad_input_is_told_before_anything_is_imported(tmp_path):
    out, file = str(tmp_path / "out"), tmp_path / "file"
    file.write_text("")
    assert "--prompts 4: expected at least 16" in told_before_torch("verify", "--prompts", "4", "--out", out)
    assert "--tokens 3: expected at least 8" in told_before_torch("verify", "--tokens", "3", "--out", out)
    assert "gdn_chunk: expected one of (16, 32, 64), found 24" in told_before_torch("verify", "--gdn-chunk", "24", "--out", out)
    model = write(tmp_path / "m", weights=False)
    (tmp_path / "m" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert "Qwen3ForCausalLM has no Gated DeltaNet" in told_before_torch("verify", "--gdn-form", "cpr", "--model", model, "--out", out)
    for verb in (["verify"], ["trace", "run"]):
        assert f"--out {str(file)!r}: File exists; name a folder" in told_before_torch(*verb, "--out", str(file))
        with open(tmp_path / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert "another run writes to" in told_before_torch(*verb, "--out", str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_is_not_read_is_told(tmp_path, capsys):
    for name in ("dtype", "torch_dtype"):
        folder = write(tmp_path / name, weights=False, **{name: "float16"})
        (tmp_path / name / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        assert main(["verify", "--model", folder, "--out", folder + "/config.json"]) == 2
        assert f"note: config.json: {name}: 'float16' is not read: both runtimes compute in bfloat16" in capsys.readouterr().err


def test_graphs_are_refused_where_there_are_none(tmp_path, monkeypatch):
    def made(model):
        return make_options(model, str(tmp_path), full=False, plant=False, timeout=1.0, cuda_graphs=True)

    monkeypatch.setattr("isoexec.verify.run.check_model", lambda folder: CONFIG)
    if backend() == "cpu":
        with pytest.raises(ContractError, match="--cuda-graphs: expected an environment for GPUs"):
            made(str(tmp_path))
    monkeypatch.setattr("isoexec.verify.run.backend", lambda: "cuda")
    monkeypatch.setattr("isoexec.verify.run.check_backend", lambda: None)
    for model in (str(tmp_path), None):
        runs = made(model).plan.engines
        assert all(run.shape.cuda_graphs and "replays" in s.evidence for run in runs for s in (*run.before, *run.after_sync))


def test_a_run_that_ends_early_reports_the_models_it_has_finished(tmp_path, monkeypatch, capsys):
    def one_model_then_interrupted(run, folder, plan):
        if run._models:
            raise KeyboardInterrupt
        run._comparisons.append(Comparison("first", "isoexec", "together", [0.0], 1, 1, True))
        run._models["first"] = {"mean_abs_error_to_hf_fp32": None}

    monkeypatch.setattr(_Run, "_start_workers", lambda run: None)
    monkeypatch.setattr(_Run, "_make_checkpoint", lambda run, architecture: tmp_path / architecture)
    monkeypatch.setattr(_Run, "_run_model", one_model_then_interrupted)
    assert main(["verify", "--out", str(tmp_path)]) == 130
    assert "INCONCLUSIVE: the run ended after first: KeyboardInterrupt" in capsys.readouterr().out
    document = json.loads((tmp_path / "verify.json").read_text())
    assert (document["status"], [run["model"] for run in document["runs"]]) == (3, ["first"])


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
@pytest.mark.parametrize("words", [["verify", "--timeout"], ["audit", "--timeout"], ["trace", "run", "--temperature"]])
def test_a_number_that_cannot_be(words, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, value])
    assert ended.value.code == 2 and f"{words[-1]}: expected a finite number above 0, found '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["verify"], ["audit"], ["trace", "run"]])
def test_a_checkpoint_is_judged_before_anything_is_imported(words, tmp_path):
    folder = write(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    said = told_before_torch(*words, "--model", folder)
    assert said.startswith(f"isoexec: model {folder!r}: config.json: quantization_config: expected None, found ")


@pytest.mark.parametrize("native, plant, arms", [(True, False, ARMS), (False, False, ("isoexec",)), (True, True, ("isoexec",))])
def test_arms_that_run(tmp_path, native, plant, arms):
    options = make_options(None, str(tmp_path), full=False, plant=plant, timeout=1.0, native=native)
    assert _Run(options, None, tmp_path, None)._arms == arms


@pytest.mark.parametrize("version, device, hidden", [("0.23.0+cpu", "cpu", True), ("0.23.0+precompiled", "cuda", False)])
def test_a_build_decides_the_device(monkeypatch, version, device, hidden):
    """GPUs are hidden from the processes of a build for the CPU, which would find another device than their contract's."""
    monkeypatch.setattr("isoexec.verify.run.importlib.metadata.version", lambda name: version)
    assert backend() == device and (worker_environment(None).get("CUDA_VISIBLE_DEVICES") == "") is hidden


@pytest.mark.parametrize("place", [".", "absent/c.json"])
def test_a_contract_needs_a_file_in_a_folder(tmp_path, monkeypatch, capsys, place):
    monkeypatch.chdir(tmp_path)
    assert main(["contract", "build", "--model", write(tmp_path / "m"), "--backend", "cpu", "-o", place]) == 2
    assert f"-o {place}: expected a file in a folder that exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_contract_of_a_model_that_nothing_runs_does_not_pass(tmp_path, capsys):
    file = tmp_path / "c.json"
    file.write_text(dataclasses.replace(contract_for_model(write(tmp_path / "m"), "cpu"), architecture="LlamaForCausalLM").to_json())
    assert main(["contract", "check", str(file)]) == 1
    assert "found LlamaForCausalLM; no runtime runs it" in capsys.readouterr().out


def test_a_file_that_is_no_text_is_named_once(tmp_path, capsys):
    (tmp_path / "c.json").write_bytes(b"\xff\xfe")
    assert main(["contract", "show", str(tmp_path / "c.json")]) == 2
    assert capsys.readouterr().err.count("c.json") == 1
