"""The table, verify.json and the picture, from numbers worked out by hand."""

import json

from isoexec.verify.compare import Scored, compare
from isoexec.verify.protocol import to_bits
from isoexec.verify.report import table, write_json, write_picture


def comparisons():
    engine = [Scored(to_bits([-1.0, -2.0]), ["a", "b"])]
    trainer = [Scored(to_bits([-1.0, -1.5]), ["a", "x"])]
    return [
        compare("tiny", "native", "together / score", engine, trainer),
        compare("tiny", "isoexec", "together / score", engine, engine),
        compare("tiny", "isoexec", "bad / score", [Scored(to_bits([float("inf")]))], [Scored(to_bits([-1.0]))]),
    ]


def test_table():
    lines = table([c.as_run() for c in comparisons()]).splitlines()
    assert lines[0].split()[:4] == ["model", "setting", "arm", "tokens"]
    native, isoexec, bad = (line.split() for line in lines[2:])  # the arms of a setting stay together
    assert native == "tiny together / score native 2 2.50e-01 5.00e-01 2.50e-01 50.00 % 50.00 %".split()
    assert isoexec == "tiny together / score isoexec 2 0 0 0 100 % 100 %".split()
    assert " ".join(bad[4:]) == "isoexec 1 not finite not finite not finite 0.00 % -"


def test_almost_all_is_not_printed_as_all():
    engine = [Scored(to_bits([-1.0] * 100000))]
    trainer = [Scored([*engine[0].logprobs[:-1], engine[0].logprobs[-1] + 1])]
    assert "99.99 %" in table([compare("m", "isoexec", "s", engine, trainer).as_run()])


def test_json(tmp_path):
    path = tmp_path / "verify.json"
    write_json(path, comparisons(), {"status": 1})
    document = json.loads(path.read_text())
    assert document["status"] == 1
    assert document["runs"][0] == {
        "model": "tiny", "arm": "native", "setting": "together / score", "tokens": 2,
        "mean_abs": 0.25, "max_abs": 0.5, "std_abs": 0.25, "bit_equal": 0.5, "rows_equal": 0.5,
    }  # fmt: skip
    assert document["runs"][2]["max_abs"] is None and document["runs"][2]["rows_equal"] is None


def test_picture(tmp_path):
    path = tmp_path / "verify.png"
    write_picture(path, comparisons())
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
