"""scripts/carry packs what a GPU host lacks, in pieces that join to what was packed."""

import subprocess

import house  # noqa: F401  (puts the tools on the path)
import carry
import install
import pytest
from common import Stop


def test_a_list_of_packages_in_either_form(tmp_path):
    (tmp_path / "there.txt").write_text("torch==2.11.0+cu130\nNumba_CUDA\n\n# not one\nruamel.yaml @ file:///x\n")
    assert carry.read_projects(tmp_path / "there.txt") == {"torch", "numba-cuda", "ruamel-yaml"}


def test_a_host_without_torch_is_refused(tmp_path):
    (tmp_path / "there.txt").write_text("triton==3.6.0\n")
    with pytest.raises(Stop, match="torch not in"):
        carry.carry([str(tmp_path), "--there", str(tmp_path / "there.txt")])


def test_pieces_join_to_what_was_packed(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "site").mkdir(parents=True)
    target.mkdir()
    (source / "site" / "a.py").write_text("a = 1\n")
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "stack.tar.xz.07").write_text("of an earlier run")
    pieces = carry.write_pieces(source, tmp_path / "pieces", 100)
    assert len(pieces) > 1 and sorted((tmp_path / "pieces").iterdir()) == pieces
    assert [piece.stat().st_size for piece in pieces[:-1]] == [100] * (len(pieces) - 1)
    subprocess.run(["tar", "xJ", "-C", target], input=b"".join(piece.read_bytes() for piece in pieces), check=True)
    assert (target / "site" / "a.py").read_text() == "a = 1\n"


def test_sources_are_copied_without_compiled_libraries(tmp_path):
    package = tmp_path / "package"
    (package / "__pycache__").mkdir(parents=True)
    for name in ("a.py", "a.abi3.so", "kernel.cuh", "__pycache__/a.pyc"):
        (package / name).write_text("")
    carry.copy_package(package, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").rglob("*")) == ["a.py", "kernel.cuh"]


def test_attention_is_one_file_for_vllm_and_the_provider(tmp_path):
    """Also where vLLM's own copy lies there, and again after that."""
    provider, package = tmp_path / "providers" / "flash_attention_3", tmp_path / "site" / "vllm" / "vllm_flash_attn"
    for folder, content in ((provider, "provider's"), (package, "vLLM's")):
        folder.mkdir(parents=True)
        (folder / "_vllm_fa3_C.abi3.so").write_text(content)
    for _ in range(2):
        install.link_attention(tmp_path / "providers", package.parent)
        assert (package / "_vllm_fa3_C.abi3.so").read_text() == "provider's"
    tmp_path.rename(tmp_path.with_name("moved"))
    (link,), (file,) = (tmp_path.with_name("moved").glob(f"{place}/_vllm_fa3_C.abi3.so") for place in ("site/vllm/*", "providers/*"))
    assert link.samefile(file)
