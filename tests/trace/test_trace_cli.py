"""What `isoexec trace` says before it starts anything."""

import pytest

from isoexec.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "0"], "--prompts 0: expected at least 1"),
        (["--tokens", "-3"], "--tokens -3: expected at least 1"),
        (["--model", "absent"], "no such folder"),
        (["--trainer-model", "absent"], "no such folder"),
        (["--architecture", "LlamaForCausalLM"], "make_checkpoint knows"),
        (["--cuda-graphs"], "--cuda-graphs: expected --level layers or ops"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "run", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("verb", ([], ["run"], ["compare"]))
def test_help_names_every_status(capsys, verb):
    with pytest.raises(SystemExit) as ended:
        main(["trace", *verb, "--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(verdict in told for verdict in ("identical", "divergent", "bad input", "inconclusive"))


@pytest.mark.parametrize("arguments", [["run", "--html"], ["run", "--bundle"], ["compare", "a.zip", "--html"]])
@pytest.mark.parametrize("place", [".", "absent/page"])
def test_a_file_that_cannot_be_written_is_told_first(tmp_path, monkeypatch, capsys, arguments, place):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *arguments, place]) == 2
    assert capsys.readouterr().err == f"isoexec: trace: {place}: expected a file in a folder that exists\n"
