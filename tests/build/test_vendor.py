"""Where upstream's files come from, and that only the pinned ones are ever used."""

import copy
import errno
import hashlib
import http.server
import io
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import index
from common import Stop
from house import MODULE

CONTENT = bytes(range(256)) * 8192  # 2 MiB: several reads
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def test_wrong_content_in_the_given_folder(empty_house):
    path = empty_house.archives / "vllm-1.0.tar.gz"
    good = path.read_bytes()
    path.write_bytes(good + b"x")
    said = empty_house.build(ok=False)
    assert "wrong content" in said and hashlib.sha256(good).hexdigest() in said and "ISOEXEC_ARCHIVES" in said
    path.write_bytes(good)
    empty_house.build()


def test_no_network_says_what_to_do_and_leaves_a_tree_that_can_be_finished(empty_house):
    """An index nobody listens at, and the archives nowhere."""
    hidden = empty_house.archives.rename(empty_house.root / "hidden")
    empty_house.archives.mkdir()
    unreachable = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0", "ISOEXEC_UV": index.find_uv(),
                   "UV_CACHE_DIR": str(empty_house.root / "cache")}
    said = empty_house.tool("build", env=unreachable, ok=False)
    assert "package index could not be asked" in said and "ISOEXEC_ARCHIVES" in said
    empty_house.archives.rmdir()
    hidden.rename(empty_house.archives)
    empty_house.build()


def test_a_given_folder_that_is_not_there_is_no_download(empty_house):
    wrong = str(empty_house.archives) + " "
    said = empty_house.tool("build", env={"ISOEXEC_ARCHIVES": wrong}, ok=False)
    assert f"there is no folder ISOEXEC_ARCHIVES={wrong}" in said and "fetching" not in said
    empty_house.build()


def test_cached_archives_serve_without_the_given_folder(empty_house):
    cache = empty_house.root / ".cache" / "archives"
    shutil.copytree(empty_house.archives, cache)
    del empty_house.env["ISOEXEC_ARCHIVES"]
    empty_house.build()


def test_a_submodule_at_the_pinned_commit_serves(empty_house):
    """Git reached its host: the tree is made from the submodule, and no archive of it is asked for."""
    folder = empty_house.root / "third_party" / "skyrl"
    shutil.unpack_archive(empty_house.archives / "skyrl-1.0.tar.gz", empty_house.root / "unpacked", filter="data")
    shutil.copytree(empty_house.root / "unpacked" / "skyrl-1.0", folder, dirs_exist_ok=True)

    def git(*words):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@example.invalid", *words], cwd=folder, check=True,
                              capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", "--all", "--force")
    git("commit", "-qm", "release")
    (empty_house.archives / "skyrl-1.0.tar.gz").unlink()
    said = empty_house.build(ok=False)
    assert "third_party/skyrl is at another commit" in said and "git submodule update" in said
    pins = empty_house.root / "third_party" / "pins.toml"
    head, tail = pins.read_text().split("[tree.skyrl]")
    pins.write_text(head + "[tree.skyrl]" + tail.replace("0" * 40, git("rev-parse", "HEAD")))
    (folder / "skyrl" / "module.py").write_text("an edit of the submodule's files is not what is built")
    empty_house.build()
    assert "return x + 8" in (empty_house.tree() / "skyrl/module.py").read_text()
    assert not (folder / "FILLED-FROM-ARCHIVE").exists()


def test_a_clone_with_its_submodules_asks_for_no_archive(empty_house, tmp_path):
    """`git clone --recurse-submodules`, each submodule from a bare repository of its release: what git filled is built, as it is."""
    root, links = empty_house.root, {}

    def git(folder, *words):
        options = ("-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "protocol.file.allow=always")
        return subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True, text=True).stdout

    git(root, "init", "-q")
    pins = root / "third_party" / "pins.toml"
    for tree in ("vllm", "megatron", "skyrl"):
        archive = empty_house.archives / f"{tree}-1.0.tar.gz"
        shutil.unpack_archive(archive, tmp_path, filter="data")
        archive.unlink()
        release = tmp_path / f"{tree}-1.0"
        shutil.rmtree(release / f"{tree}.egg-info")  # which a release's archive has and its commit does not
        git(release, "init", "-q")
        git(release, "add", "--all", "--force")
        git(release, "commit", "-qm", "release")
        git(tmp_path, "clone", "-q", "--bare", release, f"{tree}.git")
        links[tree] = git(release, "rev-parse", "HEAD").strip()
        head, found, tail = pins.read_text().partition(f"[tree.{tree}]")
        pins.write_text(head + found + tail.replace("0" * 40, links[tree], 1))
        git(root, "config", "-f", ".gitmodules", f"submodule.third_party/{tree}.path", f"third_party/{tree}")
        git(root, "config", "-f", ".gitmodules", f"submodule.third_party/{tree}.url", str(tmp_path / f"{tree}.git"))
        git(root, "update-index", "--add", "--cacheinfo", f"160000,{links[tree]},third_party/{tree}")
    (root / ".gitignore").write_text("/build/\n/.cache/\n")
    git(root, "add", ".gitignore", ".gitmodules", "scripts", "requirements", "pyproject.toml", "third_party/pins.toml")
    git(root, "commit", "-qm", "house")

    git(tmp_path, "clone", "-q", "--recurse-submodules", root, "clone")
    clone = copy.copy(empty_house)
    clone.root = tmp_path / "clone"
    said = clone.build()
    assert "fetching" not in said and "nothing to do" in clone.build()
    for tree, commit in links.items():
        assert (clone.tree(tree) / tree / "module.py").read_text() == MODULE
        folder = clone.root / "third_party" / tree
        assert git(folder, "rev-parse", "HEAD").strip() == commit and git(folder, "status", "--porcelain", "--ignored") == ""
    assert git(clone.root, "status", "--porcelain") == ""
    states = {line[:41] for line in git(clone.root, "submodule", "status").splitlines()}
    assert states == {f" {commit}" for commit in links.values()}  # " ": checked out at the recorded commit


def test_filled_folders_leave_git_clean(empty_house):
    """third_party/<tree> is filled for reading; git sees the gitlink and nothing else, also in `git add --all`."""
    root = empty_house.root

    def git(*words):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@example.invalid", *words], cwd=root, check=True,
                              capture_output=True, text=True).stdout

    git("init", "-q")
    (root / ".gitignore").write_text("/build/\n/.cache/\n")
    (root / ".gitmodules").write_text('[submodule "third_party/skyrl"]\n\tpath = third_party/skyrl\n\turl = ../skyrl\n')
    git("add", ".gitignore", ".gitmodules", "scripts", "requirements", "pyproject.toml", "given", "third_party/pins.toml")
    for tree in ("vllm", "megatron", "skyrl"):
        git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},third_party/{tree}")
    git("commit", "-qm", "house")
    empty_house.build()
    assert (root / "third_party/skyrl/skyrl/module.py").exists() and not (root / "third_party/skyrl/skyrl.egg-info").exists()
    assert git("status", "--porcelain") == "" and git("diff") == ""
    git("add", "--all")
    assert git("status", "--porcelain") == ""
    assert f"160000 {'1' * 40} 0\tthird_party/skyrl" in git("ls-files", "-s")
    assert git("submodule", "status", "third_party/skyrl").startswith("-" + "1" * 40)
    empty_house.tool("vendor", "empty")
    assert list((root / "third_party/skyrl").iterdir()) == [] and git("status", "--porcelain") == ""


def test_foreign_files_in_third_party_are_not_overwritten(empty_house):
    (empty_house.root / "third_party" / "skyrl" / "mine.txt").write_text("")
    assert "holds files that are not from here" in empty_house.build(ok=False)
    assert (empty_house.root / "third_party" / "skyrl" / "mine.txt").exists()


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT; cuts the connection of the first `cut` requests half way; remembers the ranges asked for."""

    def __init__(self, content: bytes = CONTENT, cut: int = 0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.cut, self.ranges = content, cut, []
        self.address = f"http://user:secret@127.0.0.1:{self.server_port}/file"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.headers.get("Authorization") != "Basic dXNlcjpzZWNyZXQ=":
            return self.send_error(401)
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        start = int(asked[6:-1]) if asked else 0
        if start >= len(self.server.content):
            return self.send_error(416)
        body = self.server.content[start:]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.cut:
            self.server.cut -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(index.time, "sleep", lambda seconds: None)
    servers = []

    def start(**options):
        server = Server(**options)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_download(serve, tmp_path):
    index.fetch(serve().address, tmp_path / "file", DIGEST)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_cut_connection_is_taken_up_where_it_ended(serve, tmp_path):
    server = serve(cut=2)
    index.fetch(server.address, tmp_path / "file", DIGEST)
    assert (tmp_path / "file").read_bytes() == CONTENT
    half = len(CONTENT) // 2
    assert server.ranges == [None, f"bytes={half}-", f"bytes={half + half // 2}-"]


def test_a_part_from_an_earlier_run_is_used(serve, tmp_path):
    server = serve()
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    index.fetch(server.address, tmp_path / "file", DIGEST)
    assert server.ranges == ["bytes=1000-"] and (tmp_path / "file").read_bytes() == CONTENT


def test_a_whole_part_from_an_earlier_run_is_used(serve, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT)
    index.fetch(serve().address, tmp_path / "file", DIGEST)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_wrong_content_from_the_index_is_removed(serve, tmp_path):
    """One bit flipped: refused, and nothing of it stays that a later run could take up."""
    wrong = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    with pytest.raises(Stop, match=f"expected: sha256 {DIGEST}"):
        index.fetch(serve(content=wrong).address, tmp_path / "file", DIGEST)
    assert list(tmp_path.iterdir()) == []
    index.fetch(serve().address, tmp_path / "file", DIGEST)


def test_a_dead_server_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(index.time, "sleep", lambda seconds: None)
    with pytest.raises(Stop, match="download of file failed"):
        index.fetch("http://127.0.0.1:9/file", tmp_path / "file", DIGEST)


def test_a_full_disk_is_one_message(serve, tmp_path):
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(Stop, match="the disk is full"):
        index.fetch(serve().address, tmp_path / "file", DIGEST)


def test_a_download_that_filled_the_disk_goes_on_when_there_is_room(serve, tmp_path, monkeypatch):
    """The second block finds no room; the first is not asked for again."""
    server, block = serve(), 1 << 20

    class Full(io.FileIO):
        def write(self, data):
            if self.tell() >= block:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr(index, "open", lambda path, mode: Full(path, mode), raising=False)
    with pytest.raises(Stop, match="the disk is full"):
        index.fetch(server.address, tmp_path / "file", DIGEST)
    monkeypatch.undo()
    index.fetch(server.address, tmp_path / "file", DIGEST)
    assert (tmp_path / "file").read_bytes() == CONTENT and server.ranges == [None, f"bytes={block}-"]


def test_no_registry_is_named():
    """Tracked text of the build names no package registry; uv and pip know theirs."""
    root = Path(__file__).resolve().parents[2]
    names = ["pypi" + ".org", "python" + "hosted", "download.py" + "torch", "--extra-" + "index-url"]
    texts = [path for folder in ("scripts", "requirements", "third_party", ".ci") for path in (root / folder).rglob("*")
             if path.is_file() and not {"vllm", "megatron", "skyrl", "__pycache__"} & set(path.relative_to(root).parts)]
    assert len(texts) > 10
    for path in [*texts, root / "Makefile", root / "pyproject.toml"]:
        assert not [name for name in names if name in path.read_text()], path
