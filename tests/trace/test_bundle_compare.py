"""Bundles and their comparison, on sides made by hand: no runtime, no torch."""

import json
import os
import struct
import subprocess
import sys
import zipfile
from array import array
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import isoexec
from isoexec.cli import main
from isoexec.contract import ContractError
from isoexec.verify.trace import bundle
from isoexec.verify.trace.bundle import HEAD, Sequence
from isoexec.verify.trace.page import page
from isoexec.verify.trace.report import as_json, lines, open_report

LAYERS, TOKENS = 3, (4, 6)
STAGES = (("norm.rms_norm", 0), ("matmul.linear", 0), ("attention", 0), ("norm.residual_add", 0))
OPS = {"engine": {"attention": ["attention.write_cache", "attention.paged"]}, "trainer": {"attention": ["attention.varlen"]}}


def recording(name, case, change=lambda layer, stage, sequence, position, field, value: value, stages=lambda layer: STAGES, order=1):
    """What a Recorder returns, of two sequences; ``change`` alters digests."""
    tokens = [(s, p) for s, n in enumerate(TOKENS) for p in range(n)][::order]
    streams, lists = [], []
    for layer in (*range(LAYERS), HEAD):
        names = (("matmul.lm_head", 0),) if layer == HEAD else stages(layer)
        lists.append({"case": case, "layer": layer, "stages": [list(s) for s in names], "passes": 1})
        for place, (stage, occurrence) in enumerate(names):
            fields = []
            for field, kind in (("x", "in"), ("out", "out"), *((("position", "position"),) if stage == "attention" else ())):
                values = [p if kind == "position" else hash((layer, stage, occurrence, s, p, field)) % 2**63 for s, p in tokens]
                values = [change(layer, stage, s, p, field, v) for (s, p), v in zip(tokens, values)]
                fields.append({"name": field, "kind": kind, "dtype": "bfloat16", "width": 32, "data": array("Q", values).tobytes()})
            streams.append(
                {"case": case, "layer": layer, "stage": stage, "occurrence": occurrence, "order": place}
                | {"ops": OPS[name].get(stage, [stage]), "fields": fields}
                | {"sequence": array("i", [s for s, _ in tokens]).tobytes(), "position": array("i", [p for _, p in tokens]).tobytes()}
            )
    return {"level": "ops", "streams": streams, "lists": lists, "weights": [], "constants": [], "states": [], "tensors": [], "unplaced": {}}


def sequences(shift=0):
    bits = [0xBF800000 + i for i in range(2)]
    return {
        n: Sequence(list(range(10 * n, 10 * n + length)), length - 2, {"engine": bits, "trainer": [b + shift for b in bits]})
        for n, length in enumerate(TOKENS)
    }


def written(path, engine=None, trainer=None, seqs=None):
    sides = [("engine", engine or recording("engine", "engine_decode"), None, {}),
             ("trainer", trainer or recording("trainer", "trainer_score", order=-1), None, {})]  # fmt: skip
    bundle.write(path, sequences() if seqs is None else seqs, sides, {"model": "<b>&made"})
    return path


def test_identical(tmp_path):
    found = open_report([written(tmp_path / "a.zip")])
    assert (found.verdict, found.status, found.finding) == ("identical", 0, None)
    assert found.compared.rows == 10 * (4 * LAYERS + 1) and len(found.compared.tokens) == 10
    assert lines(found)[0].startswith("IDENTICAL")


def at(layer, stage, sequence, position, field):
    """A change of one digest."""
    key = layer, stage, sequence, position, field
    return lambda *args: args[-1] ^ (args[:5] == key)


@pytest.mark.parametrize(
    ("key", "kind", "inputs"),
    [
        ((1, "matmul.linear", 1, 3, "out"), "op", False),
        ((1, "matmul.linear", 1, 3, "x"), "structure", True),
        ((2, "attention", 0, 2, "position"), "state", False),
    ],
)
def test_one_change_is_found_where_it_is(tmp_path, key, kind, inputs):
    """One digest of some hundred, on either side."""
    for name, case in (("engine", "engine_decode"), ("trainer", "trainer_score")):
        changed = recording(name, case, at(*key))
        found = open_report([written(tmp_path / "a.zip", **{name: changed})])
        first = found.compared.first
        assert (first.where.layer, first.where.stage, first.sequence, first.position) == key[:4]
        assert (found.finding.kind, found.finding.inputs_differ, found.status) == (kind, inputs, 1)
        assert found.compared.different == {key[2:4]} and found.compared.heat[key[0]][key[2:4]]


def test_the_first_in_execution_order_wins(tmp_path):
    later, earlier = at(2, "norm.rms_norm", 0, 0, "out"), at(1, "attention", 1, 5, "out")
    changed = recording("trainer", "trainer_score", lambda *args: earlier(*args[:-1], later(*args)))
    first = open_report([written(tmp_path / "a.zip", trainer=changed)]).compared.first
    assert (first.where.layer, first.where.stage, first.position) == (1, "attention", 5)
    assert first.ops == (("attention.write_cache", "attention.paged"), ("attention.varlen",))


@pytest.mark.parametrize("more", ("engine", "trainer"))
@pytest.mark.parametrize("place", range(5))
def test_an_extra_op(tmp_path, more, place):
    """Also of a kind that the layer has: everything after it is another occurrence."""
    for extra in (("norm.gated_rms_norm", 0), ("matmul.linear", 0)):

        def stages(layer):
            names = [s for s, _ in STAGES]
            if layer == 1:
                names.insert(place, extra[0])
            return [(s, names[:i].count(s)) for i, s in enumerate(names)]

        changed = recording(more, {"engine": "engine_decode", "trainer": "trainer_score"}[more], stages=stages)
        found = open_report([written(tmp_path / "a.zip", **{more: changed})])
        assert found.finding.kind == "structure" and found.compared.first.layer == 1
        assert f"the {more} runs more ops" in found.finding.why[0]


def test_weights_constants_and_states_explain(tmp_path):
    changed = recording("trainer", "trainer_score", at(1, "attention", 1, 3, "out"))
    where = {"layer": 1, "stage": "attention", "occurrence": 0}
    engine = recording("engine", "engine_decode")

    def explained():
        finding = open_report([written(tmp_path / "a.zip", engine, changed)]).finding
        return finding.kind, " ".join(finding.why)

    assert explained()[0] == "op" and "level state" in explained()[1]
    engine["constants"], changed["constants"] = ([where | {"values": {"scale": v}}] for v in ("0.5", "0.25"))
    assert explained() == ("op", "the op computes something else from the same inputs: scale is 0.5 on the engine and 0.25 on the trainer")
    state = {"layer": 1, "sequence": 1, "position": 2}
    engine["states"] = [state | {"what": "written", "digest": "0x1"}, state | {"what": "read", "digest": "0x1"}]
    assert explained()[0] == "op"
    engine["states"][1]["digest"] = "0x2"
    assert explained()[0] == "state" and "reads at position 2" in explained()[1]
    weight = where | {"name": "w", "shape": [2, 2], "dtype": "bfloat16"}
    engine["weights"], changed["weights"] = ([weight | {"digest": f"0x{d:016x}"}] for d in (1, 2))
    assert explained()[0] == "weights"
    changed["weights"][0]["shape"] = [1, 2]  # a shard says nothing about the whole
    assert explained()[0] == "state"


def test_rows_of_another_width_are_not_compared(tmp_path):
    changed = recording("trainer", "trainer_score", at(1, "matmul.linear", 1, 3, "out"))
    for stream in changed["streams"]:
        if stream["stage"] == "matmul.linear":
            stream["fields"][1]["width"] = 16
    assert open_report([written(tmp_path / "a.zip", trainer=changed)]).verdict == "identical"


def test_nothing_in_common(tmp_path):
    other = recording("trainer", "trainer_score")
    for stream in other["streams"]:
        stream["sequence"] = array("i", [7] * 10).tobytes()
    found = open_report([written(tmp_path / "a.zip", trainer=other)])
    assert (found.verdict, found.status) == ("inconclusive", 3) and "nothing was compared" in lines(found)[-3]


def test_logprobs_that_differ_though_every_digest_agrees(tmp_path):
    found = open_report([written(tmp_path / "a.zip", seqs=sequences(shift=1))])
    assert found.verdict == "divergent" and found.finding.kind == "structure" and "outside the op library" in found.finding.why[0]


def test_two_bundles_are_aligned_by_tokens(tmp_path):
    """The second has its sequences in another order and one that the first lacks."""
    first, second = tmp_path / "engine.zip", tmp_path / "trainer.zip"
    bundle.write(first, sequences(), [("engine", recording("engine", "engine_decode"), None, {})], {})
    swapped = recording("trainer", "trainer_score", at(1, "attention", 1, 5, "out"))
    for stream in swapped["streams"]:
        numbers = array("i")
        numbers.frombytes(stream["sequence"])
        stream["sequence"] = array("i", [{0: 3, 1: 0}[n] for n in numbers]).tobytes()
    seqs = sequences()
    bundle.write(second, {3: seqs[0], 0: seqs[1], 1: Sequence([9], 1)}, [("trainer", swapped, None, {})], {})
    found = open_report([first, second])
    assert (found.compared.first.sequence, found.compared.first.position) == (1, 5)
    assert "1 sequences of" in found.notes[0]
    with pytest.raises(ContractError, match="expected two sides to compare, found 1"):
        open_report([first])


# --- elements -----------------------------------------------------------------------------------------------------------------


def test_the_first_element_of_each_dtype(tmp_path):
    import struct

    values = {
        "bfloat16": (b"\x80\x3f\x00\x40\x00\x00", b"\x80\x3f\x01\x40\x00\x80", "2.0", 1),
        "float32": (struct.pack("<3f", 1, 2, 0), struct.pack("<3f", 1, -2, 0), "2.0", 2 * 0x40000000),
        "int64": (struct.pack("<3q", 1, 2, 3), struct.pack("<3q", 1, 5, 3), "2", None),
    }
    for dtype, (ours, theirs, value, ulps) in values.items():
        sides = [recording(name, case, at(1, "matmul.linear", 1, 3, "out") if name == "trainer" else lambda *a: a[-1])
                 for name, case in (("engine", "engine_decode"), ("trainer", "trainer_score"))]  # fmt: skip
        for side, case, data in zip(sides, ("engine_decode", "trainer_score"), (ours, theirs)):
            side["tensors"] = [
                {"layer": 1, "stage": "matmul.linear", "occurrence": 0, "case": case, "sequence": 1, "position": 3}
                | {"field": "out", "kind": "out", "dtype": dtype, "shape": [1, 3], "data": data}
            ]
        element = open_report([written(tmp_path / "a.zip", *sides)]).finding.element
        assert (element.index, element.values[0], element.ulps, element.of) == ((0, 1), value, ulps, 3)


# --- files --------------------------------------------------------------------------------------------------------------------


def test_compare_needs_no_framework(tmp_path):
    """Run with torch and numpy forbidden, and without site-packages."""
    changed = recording("trainer", "trainer_score", at(1, "matmul.linear", 1, 3, "out"))
    file = written(tmp_path / "a.zip", trainer=changed)
    program = (
        "import sys\n"
        "class No:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] in ('torch', 'numpy', 'vllm', 'megatron', 'transformers'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, No())\n"
        "from isoexec.cli import main\n"
        "raise SystemExit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-S", "-c", program, "trace", "compare", str(file), "--html", str(tmp_path / "a.html")]
    environment = {"PYTHONPATH": str(Path(isoexec.__file__).parents[1]), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "layer 1, matmul.linear, sequence 1, position 3 of 6 (prompt, token id 13)" in done.stdout
    assert "layer 1, matmul.linear" in (tmp_path / "a.html").read_text()


def test_exit_statuses_and_json(tmp_path, capsys):
    file = written(tmp_path / "a.zip")
    assert main(["trace", "compare", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "identical"
    changed = recording("trainer", "trainer_score", at(1, "matmul.linear", 1, 3, "out"))
    assert main(["trace", "compare", str(written(file, trainer=changed)), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["class"], data["first"]["stage"], data["inputs_differ"]) == ("divergent", "op", "matmul.linear", False)
    assert main(["trace", "compare", str(tmp_path / "absent.zip")]) == 2
    (tmp_path / "text.zip").write_text("no zip")
    assert main(["trace", "compare", str(tmp_path / "text.zip")]) == 2
    assert "not a zip file" in capsys.readouterr().err
    assert main(["trace", "compare", *[str(file)] * 3]) == 2
    other = recording("trainer", "trainer_score")
    other["streams"] = []
    assert main(["trace", "compare", str(written(file, trainer=other))]) == 3


def members(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def rewritten(file: Path, contents: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w") as opened:
        for name, data in contents.items():
            opened.writestr(name, data)
    return file


@pytest.mark.parametrize("name", ("bundle.json", "engine/side.json", "engine/data.bin"))
def test_a_bundle_that_lacks_a_member(tmp_path, name):
    contents = members(written(tmp_path / "a.zip"))
    contents.pop(name)
    with pytest.raises(ContractError, match="not a bundle that is whole"):
        open_report([rewritten(tmp_path / "b.zip", contents)])
    contents[name] = b"\xff"
    with pytest.raises(ContractError, match="not a bundle that is whole"):
        open_report([rewritten(tmp_path / "b.zip", contents)])


def packed(file):
    """Where the packed data of each member lies: behind a header of 30 bytes, a name and an extra field."""
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as opened:
        for member in opened.infolist():
            name, extra = struct.unpack_from("<HH", whole, member.header_offset + 26)
            start = member.header_offset + 30 + name + extra
            yield start, start + member.compress_size


def test_a_bundle_that_came_damaged(tmp_path, capsys):
    """A byte of the packed data is another, or the file ends early; what is no file is not waited for."""
    whole = written(tmp_path / "a.zip").read_bytes()
    file = tmp_path / "b.zip"
    places = [place for start, end in packed(tmp_path / "a.zip") for place in range(start, end, 97)]
    assert len(places) > 20
    for place in places:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        with pytest.raises(ContractError, match="not a (zip file|bundle) that is whole"):
            open_report([file])
    file.write_bytes(whole[: len(whole) // 2])
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((file, "not a zip file"), (tmp_path / "pipe", "found a pipe"), (tmp_path, "found a folder")):
        assert main(["trace", "compare", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_a_bundle_beyond_the_memory_is_bad_input(tmp_path):
    """A small zip may claim a large array."""
    contents = members(written(tmp_path / "a.zip"))
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, data in contents.items():
            file.writestr(name, data.ljust(1 << 28, b"\0") if name == "engine/data.bin" else data)
    environment = {"PYTHONPATH": str(Path(isoexec.__file__).parents[1]), "PATH": os.environ["PATH"]}
    command = f"ulimit -v 200000; exec {sys.executable} -m isoexec.cli trace compare {tmp_path / 'b.zip'}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "holds more than the memory" in done.stderr, done.stderr


def test_the_page_does_not_replace_the_bundle(tmp_path, monkeypatch, capsys):
    file = written(tmp_path / "a.zip")
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "compare", "a.zip", "--html", str(file)]) == 2
    assert "name another file" in capsys.readouterr().err and zipfile.is_zipfile(file)


@pytest.mark.parametrize("layer", ("Infinity", "1e999", "NaN"))
def test_numbers_that_are_none_are_refused(tmp_path, layer):
    contents = members(written(tmp_path / "a.zip"))
    contents["engine/side.json"] = contents["engine/side.json"].replace(b'"layer": 1', b'"layer": ' + layer.encode(), 1)
    with pytest.raises(ContractError, match="not a bundle that is whole"):
        open_report([rewritten(tmp_path / "b.zip", contents)])


def test_another_version_is_refused(tmp_path):
    contents = members(written(tmp_path / "a.zip"))
    contents["bundle.json"] = contents["bundle.json"].replace(b'"version": 1', b'"version": 2')
    with pytest.raises(ContractError, match="bundle version 2, this isoexec reads 1"):
        open_report([rewritten(tmp_path / "b.zip", contents)])


paths = st.lists(st.integers(0, 40), min_size=1, max_size=5)
junk = (
    st.none()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=2), st.none(), max_size=1)
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.sampled_from(("bundle.json", "engine/side.json")), paths, junk)
def test_hostile_json_is_refused_or_read(tmp_path, name, path, value):
    """A value anywhere is replaced by any other: an error of ours in one line, or a report."""
    contents = members(written(tmp_path / "a.zip"))
    data = parent = json.loads(contents[name])
    key = None
    for step in path:
        at_step = parent if key is None else parent[key]
        if not isinstance(at_step, (dict, list)) or not at_step:
            break
        keys = list(at_step) if isinstance(at_step, dict) else range(len(at_step))
        parent, key = at_step, keys[step % len(keys)]
    parent[key] = value
    contents[name] = json.dumps(data).encode()
    file = rewritten(tmp_path / "b.zip", contents)
    try:
        found = open_report([file])
    except ContractError as error:
        assert "\n" not in str(error)
    else:
        assert lines(found) and page(found) and json.dumps(as_json(found))


def test_names_in_a_bundle_are_escaped_where_they_are_shown(tmp_path, capsys):
    contents = members(written(tmp_path / "a.zip"))
    hostile = json.dumps("x\x1b[2J\n\ud800<script>").encode()
    for name in ("engine/side.json", "trainer/side.json"):
        contents[name] = contents[name].replace(b'"unplaced": {}', b'"unplaced": {' + hostile + b": 1}")
    file = rewritten(tmp_path / "b.zip", contents)
    assert main(["trace", "compare", str(file), "--html", str(tmp_path / "page.html")]) == 0
    told, shown = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    assert "x\\x1b[2J\\n\\ud800<script>" in told and "\x1b" not in told
    assert "&lt;script&gt;" in shown and "<script" not in shown


def test_names_in_a_bundle_are_text_on_the_page(tmp_path):
    assert "&lt;b&gt;&amp;made" in page(open_report([written(tmp_path / "a.zip")]))


def test_tensors_of_the_checkpoint_are_named(tmp_path):
    manifests = [{"a.weight": {"shape": [2], "dtype": "bfloat16", "digest": f"0x{d:016x}", "elements": 2}} for d in (1, 2)]
    sides = [
        (n, recording(n, c), None, {"weights": m}) for n, c, m in zip(("engine", "trainer"), ("engine_decode", "trainer_score"), manifests)
    ]
    bundle.write(tmp_path / "a.zip", sequences(), sides, {})
    found = open_report([tmp_path / "a.zip"])
    assert "tensors of the checkpoint that differ: a.weight" in found.notes
    assert "weights" not in as_json(found)["environments"]["engine"]


def test_a_coarse_side_lacks_no_op(tmp_path):
    """Recorded at level layers, it has not looked at the others; of one level they would be missing."""
    coarse = recording("trainer", "trainer_score", stages=lambda layer: STAGES[-1:])
    assert open_report([written(tmp_path / "a.zip", trainer=coarse)]).finding.kind == "structure"
    coarse["level"] = "layers"
    assert open_report([written(tmp_path / "a.zip", trainer=coarse)]).verdict == "identical"
