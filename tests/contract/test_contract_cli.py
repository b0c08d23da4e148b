"""``isoexec contract``: what each verb prints, and its exit status."""

import json

import pytest

from isoexec.cli import main
from isoexec.contract import Difference
from isoexec.runtimes import evidence

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture
def contract(tmp_path):
    """(contract file, folder of its model)."""
    folder, file = tmp_path / "model", tmp_path / "contract.json"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert main(["contract", "build", "--model", str(folder), "--backend", "cpu", "-o", str(file), "--json"]) == 0
    return file, folder


def edited(file, old, new):
    text = file.read_text()
    assert old in text
    other = file.with_name("other.json")
    other.write_text(text.replace(old, new))
    return other


def test_the_form_of_gated_deltanet_is_chosen(contract, tmp_path, capsys):
    build = ["contract", "build", "--model", str(contract[1]), "--backend", "cpu", "-o", str(tmp_path / "cpr.json"), "--no-composition"]
    assert main([*build, "--gdn-form", "cpr", "--gdn-chunk", "64"]) == 2
    assert "--gdn-form, --gdn-chunk: Qwen3ForCausalLM has no Gated DeltaNet layers; leave it out" in capsys.readouterr().err
    (contract[1] / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Qwen3_5ForCausalLM"]}))
    assert main([*build, "--gdn-form", "cpr", "--gdn-chunk", "64"]) == 0
    numerics = json.loads((tmp_path / "cpr.json").read_text())["numerics"]
    assert (numerics["gdn_form"], numerics["gdn_chunk"]) == ("cpr", 64)
    assert json.loads(contract[0].read_text())["numerics"]["gdn_form"] == "cpr_wy"
    capsys.readouterr()
    assert main([*build, "--gdn-chunk", "24"]) == 2
    assert "numerics.gdn_chunk: expected one of (16, 32, 64), found 24" in capsys.readouterr().err
    assert main(["verify", "--gdn-chunk", "24", "--out", str(tmp_path / "out")]) == 2
    assert "numerics.gdn_chunk: expected one of (16, 32, 64), found 24" in capsys.readouterr().err


def test_claims_are_chosen(contract, tmp_path, capsys):
    file = tmp_path / "claims.json"
    build = ["contract", "build", "--model", str(contract[1]), "--backend", "cpu", "-o", str(file), "--no-composition"]
    assert main([*build, "--claim", "trainer_tp=2", "--claim", "trainer_sp=true"]) == 0
    claims = json.loads(file.read_text())["claims"]
    assert claims == json.loads(contract[0].read_text())["claims"] | {"trainer_tp": 2, "trainer_sp": True}
    capsys.readouterr()
    for word in ("trainer_tp", "tp=2", "trainer_tp=two", "trainer_sp=1", "engine_pp=true", "trainer_tp=0", "trainer_tp=3"):
        assert main([*build, "--claim", word]) == 2
        error = capsys.readouterr().err
        assert word.partition("=")[0] in error and len(error.splitlines()) == 1


def test_show(contract, capsys):
    capsys.readouterr()
    assert main(["contract", "show", str(contract[0])]) == 0
    table = capsys.readouterr().out
    assert main(["contract", "show", str(contract[0]), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["contract"]["composition"] and all(digest in table for digest in (shown["sha256"], *shown["identities"].values()))


def test_hostile_text_of_a_contract_is_shown_as_escapes(contract, capsys):
    """Nothing in a file moves the cursor, and what is no character ends no verb."""
    data = json.loads(contract[0].read_text())
    file = contract[0].with_name("hostile.json")
    file.write_text(json.dumps(data | {"deployment": {"a\x1b[2J": "\ud800\nb"}}))
    for verb in (["show", str(file)], ["diff", str(file), str(contract[0])]):
        capsys.readouterr()
        assert main(["contract", *verb]) == 0
        told = capsys.readouterr().out
        assert "a\\x1b[2J" in told and "\\ud800\\nb" in told and "\x1b" not in told


def test_diff(contract, capsys):
    file = contract[0]
    assert main(["contract", "diff", str(file), str(file)]) == 0
    assert "the same bits" in capsys.readouterr().out
    other = edited(file, '"gdn_chunk":16', '"gdn_chunk":32')
    assert main(["contract", "diff", str(file), str(other)]) == 1
    assert "DIFFERENT: numerical_policy.numerics.gdn_chunk: 16 against 32" in capsys.readouterr().out
    assert main(["contract", "diff", str(file), str(other), "--json"]) == 1
    assert [d["path"] for d in json.loads(capsys.readouterr().out)["refused"]] == ["numerical_policy.numerics.gdn_chunk"]
    neutral = edited(file, '"deployment":{}', '"deployment":{"page_size":"32"}')
    assert main(["contract", "diff", str(file), str(neutral)]) == 0
    assert "neutral: deployment.page_size" in capsys.readouterr().out


def test_check(contract, capsys):
    file, folder = contract
    assert main(["contract", "check", str(file), "--model", str(folder)]) == 0
    other = file.with_name("other.json")
    data = json.loads(file.read_text())
    data["composition"][0]["artifact"] = "0" * 64
    other.write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["contract", "check", str(other)]) == 1
    assert f"DIFFERENT: composition.{data['composition'][0]['region']}.artifact" in capsys.readouterr().out
    (folder / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 1e-5}))
    assert main(["contract", "check", str(file), "--model", str(folder), "--json"]) == 1
    assert "semantic.model" in json.loads(capsys.readouterr().out)["refusal"]


def test_status(contract, capsys, monkeypatch):
    file, _ = contract
    monkeypatch.delenv("ISOEXEC_CONTRACT", raising=False)
    assert main(["contract", "status"]) == 2
    monkeypatch.setenv("ISOEXEC_CONTRACT", str(file))
    capsys.readouterr()
    assert main(["contract", "status"]) == 0
    assert "ops.matmul.linear" in capsys.readouterr().out
    assert main(["contract", "status", "--json"]) == 0
    here = file.with_name("here.json")
    here.write_text(capsys.readouterr().out)
    assert main(["contract", "diff", str(here), str(here)]) == 0
    there = file.with_name("there.json")
    there.write_text(here.read_text().replace('"subnormals":"kept"', '"subnormals":"flushed"'))
    assert main(["contract", "diff", str(here), str(there)]) == 1
    assert 'numerical_policy.math.subnormals: "kept" against "flushed"' in capsys.readouterr().out


@pytest.mark.parametrize("verb", [["show"], ["check"], ["status"], ["diff", "absent.json"]])
@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe", b"[[[", None])
def test_bad_input_is_one_line(tmp_path, capsys, verb, content):
    file = tmp_path / "c.json"
    if content is not None:
        file.write_bytes(content)
    assert main(["contract", *verb, str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def _for_a_gpu(contract, file):
    return ["contract", "build", "--model", str(contract[1]), "--backend", "cuda", "--device", "sm_90", "-o", str(file)]


def test_a_gpu_contract_is_composed_without_a_gpu(contract, tmp_path):
    file = tmp_path / "gpu.json"
    assert main(_for_a_gpu(contract, file)) == 0
    entries = json.loads(file.read_text())["composition"]
    assert {"linear", "attention", "sampling", "collective"} <= {entry["region"] for entry in entries} and all(e["artifact"] for e in entries)
    assert {entry["architecture"] for entry in entries} == {"any", "sm_90"}  # those with a provider's binary are for one architecture


def test_a_backend_that_lacks_ops(contract, tmp_path, capsys, monkeypatch):
    """What exists is composed and shown, what does not is named, and no file says more than there is."""
    monkeypatch.delitem(evidence.declarations()["sampling.draw"].implementations, "cuda")
    file = tmp_path / "gpu.json"
    arguments = _for_a_gpu(contract, file)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert "attention.gpu" in printed.out and "MISSING: sampling: sampling.draw: no cuda" in printed.out
    assert "regions can be composed on cuda; no contract written" in printed.err and not file.exists()
    assert main([*arguments, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert "sampling.draw" in found["missing"]["sampling"]
    assert {"linear", "attention"} <= {entry["region"] for entry in found["composed"]} and all(e["artifact"] for e in found["composed"])


def test_a_gpu_contract_without_composition(contract, tmp_path, capsys):
    arguments = ["contract", "build", "--model", str(contract[1]), "--backend", "cuda", "-o", str(tmp_path / "gpu.json")]
    assert main([*arguments, "--no-composition"]) == 0
    assert json.loads((tmp_path / "gpu.json").read_text())["composition"] == []


def test_long_values_are_shown_where_they_differ():
    same = "a" * 500
    assert str(Difference("p", f"{same}x", f"{same}y")) == f"p: ...{'a' * 40}x against ...{'a' * 40}y"
    assert str(Difference("p", same, same[:10])) == f"p: {same[:160]}... against {same[:10]}"
    assert str(Difference("p", "1", "2")) == "p: 1 against 2"
