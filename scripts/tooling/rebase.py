"""scripts/patches rebase: move a series to another release of its tree.

A repository in .cache/rebase/<tree>-<version> holds the pinned release with the series, and the other release
as the next commit after `upstream`. Each patch is taken over by a three-way merge (git cherry-pick). Every patch
is tried, so one run shows everything that has to be done by hand.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import index
import vendor
from common import ROOT, Stop, git, git_out, sha256
from pins import Tree
from series import Series
from trees import BuildTree, apply_series, initialise


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one patch: `conflicts` empty and not `upstreamed` means it was taken over."""

    name: str
    commit: str
    conflicts: tuple[str, ...] = ()
    upstreamed: bool = False


def other_release(tree: Tree, version: str) -> Path:
    """The source archive of `version` from .cache or the index. Its sha256 comes from the index: it is not pinned yet."""
    stem = tree.archive.removesuffix(f"-{tree.version}.tar.gz")
    name = f"{stem}-{version}.tar.gz"
    cached = vendor.CACHE / name
    if version == tree.version:
        return vendor.obtain([tree])[tree.archive]
    if not cached.exists():
        found = index.resolve([f"{tree.project}=={version}"])
        if name not in found:
            raise Stop(f"the index has no source archive of {tree.project} {version}", expected=name, found=", ".join(sorted(found)),
                       do="name another release, or give the file with --archive")
        address, digest = found[name]
        index.fetch(address, cached, digest)
    return cached


def rebase(tree: Tree, series: Series, version: str, archive: Path) -> tuple[BuildTree, list[Outcome]]:
    """Rebase the series on the release in `archive`. The returned tree's `upstream` is that release."""
    folder = ROOT / ".cache" / "rebase" / f"{tree.name}-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    work = BuildTree(tree.name, folder)
    vendor.write_pristine(tree, folder)
    initialise(folder, tree.generated)
    apply_series(work, series)
    commits = work.commits()
    generated = tuple({*tree.generated, *(name.replace(tree.version, version) for name in tree.generated)})
    _check_out_release(work, version, archive, generated)
    return work, [_take_over(work, name, commit) for name, commit in zip(series.names(), commits, strict=True)]


def _check_out_release(work: BuildTree, version: str, archive: Path, generated: tuple[str, ...]) -> None:
    """Commit the other release on top of the pinned one and move the tag `upstream` there."""
    fresh = work.path.with_name(work.path.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    vendor.write_pristine_archive(archive, fresh)
    initialise(fresh, generated)
    git(work.path, "fetch", "-q", "--no-tags", fresh, "HEAD")
    release = git_out(work.path, "commit-tree", "FETCH_HEAD^{tree}", "-p", "upstream", "-m", f"upstream {version}")
    git(work.path, "checkout", "-q", "-B", "rebased", release)
    git(work.path, "tag", "-f", "upstream", release)
    work.mark_applied()
    shutil.rmtree(fresh)


def _take_over(work: BuildTree, name: str, commit: str) -> Outcome:
    done = git(work.path, "cherry-pick", "--keep-redundant-commits", commit, check=False)
    if done.returncode == 0:
        if git(work.path, "diff", "--quiet", "HEAD^", "HEAD", check=False).returncode == 0:
            git(work.path, "reset", "-q", "--hard", "HEAD^")
            return Outcome(name, commit, upstreamed=True)
        return Outcome(name, commit)
    unmerged = git_out(work.path, "status", "--porcelain", "--untracked-files=no")
    conflicts = tuple(line[3:] for line in unmerged.splitlines() if re.match(r"DD|AU|UD|UA|DU|AA|UU", line))
    git(work.path, "cherry-pick", "--abort", check=False)
    git(work.path, "reset", "-q", "--hard", "HEAD")
    return Outcome(name, commit, conflicts=conflicts or (done.stderr.strip(),))


def report(tree: Tree, version: str, archive: Path, work: BuildTree, outcomes: list[Outcome], write: bool) -> str:
    """What a person reads: each patch, and the commands that finish the move."""
    lines = [f"{tree.name} {tree.version} -> {version}"]
    for outcome in outcomes:
        if outcome.conflicts:
            lines.append(f"  CONFLICT  {outcome.name}")
            lines += [f"              {path}" for path in outcome.conflicts]
        else:
            lines.append(f"  {'in release' if outcome.upstreamed else 'moved     '} {outcome.name}")
    conflicted = [outcome for outcome in outcomes if outcome.conflicts]
    if conflicted:
        lines += ["to finish by hand, in this order:", f"  cd {work.path.relative_to(ROOT)}"]
        lines += [f"  git cherry-pick {o.commit[:12]}   # {o.name}: mend the files above, git add, git cherry-pick --continue" for o in conflicted]
        lines.append(f"  scripts/patches export {tree.name} --from {work.path.relative_to(ROOT)}   # from the repository's root")
    elif not write:
        lines.append(f"nothing to do by hand: run again with --write to put the moved series into patches/{tree.name}")
    lines.append(f'then in third_party/pins.toml [tree.{tree.name}]: version = "{version}", archive = "{archive.name}",\n'
                 f'  sha256 = "{sha256(archive)}", commit = the release\'s; `git update-index --cacheinfo 160000,COMMIT,third_party/{tree.name}`')
    return "\n".join(lines)
