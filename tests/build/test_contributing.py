"""CONTRIBUTING.md and docs/ say what there is: the files and names they give, and the way to change a patch."""

import re

import pytest

from house import ROOT

import patches  # after house, which puts the tools on the path

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def missing(page_text: str) -> list[str]:
    """Paths of this repository in backticks or links of a page that do not exist; `<name>`, `*` and what a build makes are left out."""
    named = re.findall(r"`((?:isoexec|tests|scripts|docs|patches|requirements|recipes|bench|third_party)/[^`\s]+)`", page_text)
    named += re.findall(r"\]\((?!http)([^)#]+)\)", page_text)
    return [name for name in named if not set("<>*{") & set(name) and not (ROOT / name).exists() and not (ROOT / "docs" / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page):
    text = page.read_text()
    assert missing(text) == []
    assert missing(text + "`isoexec/absent.py` [x](docs/absent.md)") == ["isoexec/absent.py", "docs/absent.md"]


def test_the_tables_of_a_model_have_the_names_that_contributing_gives():
    text = re.search(r"## Add a model\n(.*?)\n## ", (ROOT / "CONTRIBUTING.md").read_text(), re.S)[1]
    example = re.search(r"`(\w+ForCausalLM)` is an example", text)[1]
    tables = {"isoexec/contract/architectures.py": ["REGIONS"], "isoexec/contract/checkpoints.py": ["COVERED"],
              "isoexec/runtimes/vllm/settings.py": ["ENGINE_OF"],
              "isoexec/runtimes/megatron/spec.py": ["_DECODERS"], "isoexec/runtimes/megatron/settings.py": ["ARCHITECTURES"],
              "isoexec/verify/checkpoint.py": ["ARCHITECTURES"], "isoexec/verify/settings.py": ["MADE_ARCHITECTURES"]}
    for file, names in tables.items():
        source = (ROOT / file).read_text()
        assert file.rsplit("/", 1)[1] in text
        for name in names:
            table = re.search(rf"^{name}\b.*?[({{]\n(.*?)^[)}}]$", source, re.S | re.M)
            assert table and f'"{example}"' in table[1] and f"`{name}`" in text, (file, name)
    holders = {path.relative_to(ROOT).as_posix() for path in (ROOT / "isoexec").rglob("*.py")
               if re.search(rf'^ +"{example}"[:,]', path.read_text(), re.M)}
    assert holders - set(tables) == {"isoexec/runtimes/megatron/mapping.py"} and "`mapping.py`" in text


def test_a_patch_in_mid_series_is_changed_as_contributing_says(house):
    """`add-one` gets the change, `add-two` on top of it stays as it is, byte for byte."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "git commit -a --fixup COMMIT" in text and "git rebase -i --autosquash upstream" in text
    before = {path.name: path.read_text() for path in (house.root / "patches/skyrl").iterdir()}
    [commit] = house.git("log", "--format=%h", "--grep=Add one").split()
    path = house.tree() / "skyrl/module.py"
    path.write_text(path.read_text().replace("return x + 100\n", "return x + 101\n"))
    house.git("commit", "-q", "-a", "--fixup", commit)
    assert "in the tree, not in the series (export): fixup! Add one" in house.tool("patches", "status", "skyrl")
    house.git("-c", "sequence.editor=true", "rebase", "-q", "-i", "--autosquash", "upstream")
    assert house.tool("patches", "export", "skyrl") == "skyrl: 2 patches, wrote add-one.patch\n"
    after = {path.name: path.read_text() for path in (house.root / "patches/skyrl").iterdir()}
    assert after.pop("add-one.patch") == before.pop("add-one.patch").replace("+    return x + 100", "+    return x + 101") and after == before
    house.tool("patches", "check", "skyrl")
    assert "nothing to do" in (house.build(), house.build())[1]


def test_the_tool_names_a_page_that_is_there():
    page, heading = re.search(r'then export \((\S+\.md), "(.*?)"\)', patches.__doc__).groups()
    assert f"## {heading}\n" in (ROOT / page).read_text()
