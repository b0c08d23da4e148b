"""A build tree: build/<backend>/<name>, a git repository whose tag `upstream` is the pristine release and
whose commits on top are the patch series, one each.

The reference refs/isoexec/applied marks the last commit that came from the series. What lies beyond it is
somebody's work in progress, and no tool here throws that away unless told to.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from common import Stop, disk_full, git, git_out, says_disk_full
from series import Patch, Series, from_commit

UPSTREAM = "refs/tags/upstream"
APPLIED = "refs/isoexec/applied"
# Written into the trees by installing and running them; upstream's own .gitignore does not cover all of it.
EXCLUDE = ("__pycache__/", "*.pyc", "*.so", "*.egg-info/", "/build/", ".pytest_cache/", ".hypothesis/")


@dataclasses.dataclass(frozen=True)
class BuildTree:
    name: str
    path: Path

    def exists(self) -> bool:
        return (self.path / ".git").is_dir() and git(self.path, "rev-parse", "-q", "--verify", UPSTREAM, check=False).returncode == 0

    def require(self) -> None:
        if not self.exists():
            raise Stop(f"there is no tree at {self.path}", expected="a git repository with the tag `upstream`",
                       do="run `make build` first")

    def commits(self) -> list[str]:
        """Commits on top of upstream, oldest first."""
        return git_out(self.path, "rev-list", "--reverse", "--first-parent", f"{UPSTREAM}..HEAD").split()

    def patches(self) -> list[Patch]:
        return [from_commit(self.path, commit) for commit in self.commits()]

    def edited(self) -> list[str]:
        """Tracked files that differ from HEAD."""
        return git_out(self.path, "status", "--porcelain", "--untracked-files=no").splitlines()

    def applied(self) -> str:
        found = git(self.path, "rev-parse", "-q", "--verify", APPLIED, check=False).stdout.strip()
        return found or git_out(self.path, "rev-parse", UPSTREAM)

    def mark_applied(self) -> None:
        git(self.path, "update-ref", APPLIED, "HEAD")

    def unexported(self, series: Series) -> list[str]:
        """Subjects of commits that are neither the applied series nor in the series now."""
        if git_out(self.path, "rev-parse", "HEAD") == self.applied():
            return []
        kept = {text for _, text in series.texts()}
        return [patch.subject for patch in self.patches() if patch.text not in kept]

    @property
    def applying(self) -> Path:
        """Present while a series is being applied: edits found beside it are an interrupted run's, not a person's."""
        return self.path / ".git" / "isoexec-applying"

    def end_interrupted_apply(self, series: Series) -> None:
        """Clear what an apply of `series` that was cut off left half-written: the tree is then its last whole commit."""
        if not self.applying.exists():
            return
        (self.path / ".git" / "index.lock").unlink(missing_ok=True)
        shutil.rmtree(self.path / ".git" / "rebase-apply", ignore_errors=True)
        git(self.path, "reset", "-q", "--hard", "HEAD")
        # git writes the index last, so a file that a patch adds may lie here untracked, and would stop that patch.
        untracked = git_out(self.path, "ls-files", "-z", "--others").split("\0")
        for name in {name for _, patch in series.patches() for name in patch.added()} & set(untracked):
            (self.path / name).unlink()
        self.applying.unlink()


def initialise(path: Path, generated: tuple[str, ...]) -> None:
    """Turn the pristine files at `path` into a repository with the tag `upstream`.

    Everything is committed, also what upstream's .gitignore names; `generated` is removed first, and ignored
    when installing writes it again.
    """
    for name in generated:
        target = path / name
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    git(path, "init", "-q", "-b", "main")
    exclude = [*EXCLUDE, *(f"/{name}" for name in generated)]
    (path / ".git" / "info").mkdir(exist_ok=True)
    (path / ".git" / "info" / "exclude").write_text("".join(f"{line}\n" for line in exclude))
    git(path, "add", "--all", "--force")
    git(path, "commit", "-q", "--allow-empty", "-m", "upstream")
    git(path, "tag", "upstream")
    git(path, "update-ref", APPLIED, "HEAD")


def apply_series(tree: BuildTree, series: Series, *, discard: bool = False) -> int:
    """Make `tree` upstream plus `series`, keeping the commits that are right already. Returns how many were applied anew."""
    tree.require()
    tree.end_interrupted_apply(series)
    if not discard:
        work = tree.unexported(series) + tree.edited()
        if work:
            raise Stop(f"{tree.path} holds work that is not in {series.folder}", expected="only commits of the series, no edited file",
                       found="\n".join(work), do="`scripts/patches export` keeps it; `scripts/patches apply --discard` drops it")
    wanted = series.patches()
    commits = tree.commits()
    same = 0
    while same < min(len(commits), len(wanted)) and from_commit(tree.path, commits[same]) == wanted[same][1]:
        same += 1
    tree.applying.touch()
    git(tree.path, "reset", "-q", "--hard", commits[same - 1] if same else UPSTREAM)
    tree.mark_applied()
    for name, patch in wanted[same:]:
        _apply(tree, series, name, patch)
    tree.applying.unlink()
    return len(wanted) - same


def _apply(tree: BuildTree, series: Series, name: str, patch: Patch) -> None:
    done = git(tree.path, "am", "--quiet", "--keep-cr", "--no-3way", "--committer-date-is-author-date", "--patch-format=mbox",
               "--whitespace=nowarn", check=False, stdin="From isoexec Sat Jan  1 00:00:00 2000\nDate: Sat, 1 Jan 2000 00:00:00 +0000\n" + patch.text)
    if done.returncode == 0:
        tree.mark_applied()
        return
    if says_disk_full(done.stdout + done.stderr):  # the mark `applying` stays: the next run clears what was half-written
        raise disk_full(f"while applying {tree.name}/{name}")
    tree.end_interrupted_apply(series)
    raise Stop(f"a patch does not apply: {tree.name}/{name}", expected=f"it applies to {git_out(tree.path, 'describe', '--tags', '--always')} of {tree.path}",
               found=done.stderr.strip() or done.stdout.strip(),
               do="the tree stands at the last patch that applied: make the change there anew, commit it with the patch's message,\n"
                  "apply what follows by hand, `scripts/patches export`; or undo the edit of the patch and run again")
