"""`isoexec audit` as a person runs it: both processes, every supported architecture. The list is empty, and it was looked for."""

from __future__ import annotations

import importlib.util
import json

import pytest

from isoexec.cli import main
from isoexec.contract import CASES
from isoexec.verify.settings import MADE_ARCHITECTURES

missing = [name for name in ("vllm", "megatron") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(missing), reason=f"{missing} not installed; run `make build`")
def test_every_architecture_is_clean(tmp_path, capfd):
    status = main(["audit", "--json", str(tmp_path / "audit.json")])
    output = capfd.readouterr()
    assert status == 0, output.out + output.err
    document = json.loads((tmp_path / "audit.json").read_text())
    assert document["verdict"] == "clean" and tuple(document["models"]) == MADE_ARCHITECTURES
    for model in document["models"].values():
        assert set(model["cases"]) == set(CASES) and model["faults"] == model["voids"] == []
        for found in model["cases"].values():
            assert found["strays"] == [] and found["ops"] and found["inside"] and found["outside"]
    assert output.out.splitlines()[-1].startswith("isoexec audit: clean: 0 call sites")
