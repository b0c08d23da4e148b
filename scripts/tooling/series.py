"""Patches as text: the canonical form, its header, and a series folder.

A canonical patch is a mail that `git am` takes, without anything that changes when nothing has changed: no
commit id, date, tool version, index line or diffstat, one line of context, no enclosing-function text.
Its file name comes from its subject; the order is that of the file `series`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path

from common import AUTHOR, ROOT, Stop, git, git_out, write_atomically

CONTEXT_LINES = 1  # positions are exact (check proves it), so one line is enough to anchor a hunk
TRAILERS = ("Ops", "Upstream-status", "Drop-when")
UPSTREAM_STATUS = ("inappropriate", "to be sent", "sent")
EXAMPLE = """Route RMSNorm through isoexec

    <why: what differs between the two sides without this, and why it cannot be done from outside>

    Ops: norm                    (the ops it routes, or `none: portability`)
    Upstream-status: inappropriate      (or `to be sent`, or `sent <where>`)
    Drop-when: <the upstream change that makes it needless>"""


@dataclasses.dataclass(frozen=True)
class Patch:
    """One patch: commit message (without trailing newline) and diff."""

    message: str
    diff: str

    @property
    def subject(self) -> str:
        return self.message.split("\n", 1)[0]

    @property
    def file_name(self) -> str:
        slug = re.sub(r"[^a-z0-9]+", "-", self.subject.lower()).strip("-")
        return (slug[:60].rsplit("-", 1)[0] if len(slug) > 60 else slug) + ".patch"

    @property
    def text(self) -> str:
        body = self.message.partition("\n")[2].lstrip("\n")
        return f"From: {AUTHOR}\nSubject: {self.subject}\n\n{body}\n---\n{self.diff}"

    def trailers(self) -> dict[str, str]:
        found = {}
        for line in self.message.rsplit("\n\n", 1)[-1].splitlines():
            name, colon, value = line.partition(":")
            if colon and name in TRAILERS:
                found[name] = value.strip()
        return found

    def added(self) -> list[str]:
        """Paths of the files that it adds."""
        return re.findall(r"^diff --git a/(.+) b/\1\nnew file mode ", self.diff, re.M)

    def faults(self) -> list[str]:
        """What keeps this from being a patch of ours, each as one sentence; empty if nothing does."""
        faults = []
        if "\n\n" not in self.message or self.message.split("\n", 2)[1:2] != [""]:
            faults.append("the message has no body: after the subject and an empty line, say why")
        elif self.message.partition("\n")[2].strip().startswith(tuple(f"{name}:" for name in TRAILERS)):
            faults.append("the message says what, not why: put the reason between subject and trailers")
        trailers = self.trailers()
        faults += [f"the trailer `{name}:` is missing or empty" for name in TRAILERS if not trailers.get(name)]
        status = trailers.get("Upstream-status", "")
        if status and not status.startswith(UPSTREAM_STATUS):
            faults.append(f"`Upstream-status: {status}` is none of {', '.join(UPSTREAM_STATUS)}")
        if not self.subject.isascii() or len(self.subject) > 100:
            faults.append("the subject is longer than 100 characters or not ASCII")
        if re.search(r"^(---|diff --git |Index: |From |From: |Subject: |Date: )", self.message, re.M):
            faults.append("a line of the message would end or alter it in a mail (---, diff, From, Subject, Date)")
        if not self.diff:
            faults.append("it changes nothing")
        if re.search(r"^deleted file mode|^GIT binary patch|^Binary files", self.diff, re.M):
            faults.append("it deletes a file or changes a binary one: that would copy upstream's content here")
        return faults


def parse(text: str, name: str) -> Patch:
    """The patch in a file's text; `name` is for messages."""
    head, mark, diff = text.partition("\n---\n")
    found = re.fullmatch(r"From: (.*)\nSubject: (.*)\n\n(.*)", head, re.S)
    if not mark or not found or (diff and not diff.startswith("diff --git ")):
        raise Stop(f"{name} is not a patch of the canonical form",
                   expected="From:, Subject:, an empty line, the reason and trailers, `---`, the diff",
                   found=text[:200], do="make the change as a commit in the build tree and run `scripts/patches export`")
    return Patch(f"{found[2]}\n\n{found[3].rstrip()}", diff)


def from_commit(tree: Path, commit: str) -> Patch:
    """The canonical patch of one commit of a build tree."""
    if len(git_out(tree, "rev-list", "--parents", "-n1", commit).split()) != 2:
        raise Stop(f"commit {commit[:12]} in {tree} is a merge or a root", expected="a line of plain commits on `upstream`",
                   do="put your change on top with `git rebase upstream`")
    message = git(tree, "log", "-1", "--format=%B", commit).stdout.rstrip()
    diff = git(tree, "diff-tree", "-p", "--no-color", "--no-renames", "--no-ext-diff", "--no-textconv", f"-U{CONTEXT_LINES}",
               "--inter-hunk-context=0", "--diff-algorithm=histogram", "--indent-heuristic", "--submodule=short",
               "--src-prefix=a/", "--dst-prefix=b/", f"{commit}^", commit).stdout
    # A content line begins with ' ', '+', '-' or '\', so these two can only be headers.
    diff = re.sub(r"^index .*\n", "", diff, flags=re.M)
    diff = re.sub(r"^(@@ -\S+ \+\S+ @@).*$", r"\1", diff, flags=re.M)
    return Patch(re.sub(r"[ \t]+$", "", message, flags=re.M), diff)


@dataclasses.dataclass(frozen=True)
class Series:
    """A folder of patches: `series` lists file names in order, `#` starts a comment line."""

    folder: Path

    @classmethod
    def of(cls, tree_name: str, root: Path = ROOT) -> "Series":
        return cls(root / "patches" / tree_name)

    def names(self) -> list[str]:
        order = self.folder / "series"
        lines = order.read_text().splitlines() if order.exists() else []
        names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        present = {path.name for path in self.folder.glob("*.patch")}
        if set(names) != present or len(set(names)) != len(names):
            raise Stop(f"{order} and the patches beside it disagree", expected="every patch file listed once",
                       found=f"listed only: {sorted(set(names) - present)}\nnot listed: {sorted(present - set(names))}"
                             f"\nlisted twice: {sorted({n for n in names if names.count(n) > 1})}",
                       do="mend the series file, or export the series again from the build tree")
        return names

    def texts(self) -> list[tuple[str, str]]:
        return [(name, (self.folder / name).read_text(encoding="utf-8", errors="surrogateescape")) for name in self.names()]

    def patches(self) -> list[tuple[str, Patch]]:
        return [(name, parse(text, f"{self.folder.name}/{name}")) for name, text in self.texts()]

    def digest(self) -> str:
        return hashlib.sha256(repr(self.texts()).encode("utf-8", "surrogateescape")).hexdigest()

    def write(self, patches: list[Patch]) -> list[str]:
        """Make the folder hold exactly `patches`; unchanged files are not touched. Returns what changed."""
        wanted = {patch.file_name: patch.text for patch in patches}
        if len(wanted) != len(patches):
            names = [patch.file_name for patch in patches]
            raise Stop(f"two patches for {self.folder.name} have one file name", expected="subjects that differ",
                       found=", ".join(sorted({n for n in names if names.count(n) > 1})), do="reword one subject")
        wanted["series"] = "".join(f"{patch.file_name}\n" for patch in patches)
        changed = []
        for path in self.folder.glob("*.patch"):
            if path.name not in wanted:
                path.unlink()
                changed.append(f"removed {path.name}")
        for name, text in wanted.items():
            path = self.folder / name
            if not path.exists() or path.read_text(encoding="utf-8", errors="surrogateescape") != text:
                write_atomically(path, text)
                changed.append(f"wrote {name}")
        return changed


def refuse_faults(patches: list[tuple[str, Patch]], where: str) -> None:
    faults = [f"{name}: {fault}" for name, patch in patches for fault in patch.faults()]
    if faults:
        raise Stop(f"{where}: not patches of this project yet", expected="a message of this form:\n" + EXAMPLE,
                   found="\n".join(faults), do="reword the commit in the build tree (git commit --amend, git rebase -i upstream) and export")
