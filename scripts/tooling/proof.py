"""scripts/patches check: the three claims about a series, shown from the pristine files.

1. The series applies: by `git am`, every hunk at the line it names, no fuzz, no offset.
2. It is canonical: the export of the tree it makes is the series, byte for byte.
3. The built tree is pristine files + series: same git tree, nothing edited, nothing extra.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import vendor
from common import ROOT, Stop, git, git_out
from pins import Tree
from series import Series, refuse_faults
from trees import BuildTree, apply_series, initialise


def check(tree: Tree, series: Series, built: BuildTree) -> str:
    """Prove the claims for one tree; returns a line that says what was shown, or stops."""
    refuse_faults(series.patches(), f"patches/{tree.name}")
    (ROOT / ".cache").mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"check-{tree.name}-", dir=ROOT / ".cache"))
    try:
        fresh = BuildTree(tree.name, scratch / tree.name)
        vendor.write_pristine(tree, fresh.path)
        initialise(fresh.path, tree.generated)
        apply_series(fresh, series)
        refuse_other_bytes(fresh, series)
        if not built.exists():
            return f"{tree.name}: {len(series.names())} patches apply and export to themselves (build/ has no such tree)"
        refuse_other_tree(fresh, built, series)
        return f"{tree.name}: {len(series.names())} patches apply, export to themselves, and make {built.path.relative_to(ROOT)}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_other_bytes(fresh: BuildTree, series: Series) -> None:
    """Offsets would show here too: the line numbers of a hunk are those of the tree, not those of the file."""
    exported = fresh.patches()
    for (name, text), patch in zip(series.texts(), exported, strict=True):
        if (patch.file_name, patch.text) != (name, text):
            line, expected, found = first_difference(text, patch.text) if patch.file_name == name else (0, name, patch.file_name)
            raise Stop(f"{series.folder.name}/{name} is not what exporting it gives", expected=f"the file's line {line}: {expected}",
                       found=f"exported: {found}",
                       do="`scripts/patches apply` and then `scripts/patches export`, and commit what changes")


def first_difference(one: str, other: str) -> tuple[int, str, str]:
    lines = zip([*one.splitlines(True), "(end)"], [*other.splitlines(True), "(end)"])
    return next((number, repr(a), repr(b)) for number, (a, b) in enumerate(lines, 1) if a != b)


def refuse_other_tree(fresh: BuildTree, built: BuildTree, series: Series) -> None:
    if git_out(fresh.path, "rev-parse", "HEAD^{tree}") != git_out(built.path, "rev-parse", "HEAD^{tree}"):
        git(built.path, "fetch", "-q", "--no-tags", fresh.path, "HEAD")
        differing = git_out(built.path, "diff", "--name-status", "--no-renames", "FETCH_HEAD", "HEAD")
        raise Stop(f"{built.path} is not pristine files + series", expected=f"the tree that patches/{series.folder.name} makes",
                   found=differing, do="`scripts/patches export` if the tree is right, `scripts/patches apply` if the series is")
    if extra := git_out(built.path, "status", "--porcelain", "--untracked-files=all"):
        raise Stop(f"{built.path} holds edits or files of no commit", expected="a clean git status", found="\n".join(extra.splitlines()[:20]),
                   do="commit and export them, or remove them")
