"""scripts/patches: a series is what its commits say, and no tool loses anybody's work."""

import pytest


def test_canonical_form(house):
    """Nothing in a patch varies when the change does not; one line of context, no upstream text in hunk headers."""
    assert house.patch("add-one.patch").read_text() == """\
From: IsoExec <isoexec@example.invalid>
Subject: Add one

The two sides differ here without it.

Ops: none: portability
Upstream-status: inappropriate
Drop-when: never
---
diff --git a/skyrl/module.py b/skyrl/module.py
--- a/skyrl/module.py
+++ b/skyrl/module.py
@@ -5,3 +5,3 @@
 def f1(x):
-    return x + 1
+    return x + 100
 
"""
    assert house.patch("series").read_text() == "add-one.patch\nadd-two.patch\n"


def test_round_trip_from_nothing(house):
    """apply makes, from upstream, the tree that was exported; commit ids depend on content alone."""
    exported = house.git("rev-parse", "HEAD^{tree}")
    house.git("reset", "-q", "--hard", "upstream")
    assert "2 applied anew" in house.tool("patches", "apply", "skyrl")
    first = house.git("rev-parse", "HEAD")
    assert house.git("rev-parse", "HEAD^{tree}") == exported
    house.git("reset", "-q", "--hard", "upstream")
    house.tool("patches", "apply", "skyrl")
    assert house.git("rev-parse", "HEAD") == first
    assert "unchanged" in house.tool("patches", "export", "skyrl")


def test_generated_files_are_no_part_of_the_tree(house):
    assert house.git("ls-files").split() == [".gitignore", "a.md", "pyproject.toml", "skyrl/module.py"]


def test_only_what_follows_a_change_is_applied_anew(house):
    path = house.patch("add-two.patch")
    path.write_text(path.read_text().replace("800", "900"))
    assert "1 applied anew" in house.tool("patches", "apply", "skyrl")
    assert "return x + 900" in (house.tree() / "skyrl/module.py").read_text()


@pytest.mark.parametrize("work", ["commit", "edit"])
def test_apply_keeps_work_unless_told(house, work):
    if work == "commit":
        house.commit("Add three", "return x + 3\n", "return x + 300\n")
    else:
        (house.tree() / "skyrl/module.py").write_text("edited")
    message = house.tool("patches", "apply", "skyrl", ok=False)
    assert "work that is not in" in message and ("Add three" if work == "commit" else "skyrl/module.py") in message
    assert "scripts/patches export" in message
    house.tool("patches", "apply", "--discard", "skyrl")
    assert house.git("status", "--porcelain") == "" and "Add three" not in house.git("log", "--format=%s")


def test_export_refuses_edits_in_no_commit(house):
    (house.tree() / "skyrl/module.py").write_text("edited")
    assert "edits that are in no commit" in house.tool("patches", "export", "skyrl", ok=False)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("{subject}\n\nWhy.\n\nUpstream-status: sent\nDrop-when: never\n", "`Ops:` is missing"),
        ("{subject}\n\nWhy.\n\nOps: norm\nDrop-when: never\n", "`Upstream-status:` is missing"),
        ("{subject}\n\nWhy.\n\nOps: norm\nUpstream-status: sent\n", "`Drop-when:` is missing"),
        ("{subject}\n\nWhy.\n\nOps: norm\nUpstream-status: perhaps\nDrop-when: never\n", "is none of"),
        ("{subject}\n\nOps: norm\nUpstream-status: sent\nDrop-when: never\n", "says what, not why"),
        ("{subject}\n\nFrom: x\n\nOps: norm\nUpstream-status: sent\nDrop-when: never\n", "would end or alter it"),
    ],
)
def test_export_refuses_a_message_without_reasons(house, message, fault):
    house.commit("Add three", "return x + 3\n", "return x + 300\n", message=message)
    assert fault in house.tool("patches", "export", "skyrl", ok=False)
    assert not house.patch("add-three.patch").exists()


def test_export_refuses_to_copy_upstream_through_a_deletion(house):
    house.git("rm", "-q", "a.md")
    house.git("commit", "-qm", "Drop a\n\nWhy.\n\nOps: norm\nUpstream-status: sent\nDrop-when: never")
    assert "deletes a file" in house.tool("patches", "export", "skyrl", ok=False)


def test_new_files_and_modes_survive(house):
    (house.tree() / "skyrl" / "new.sh").write_text("#!/bin/sh\n")
    (house.tree() / "skyrl" / "new.sh").chmod(0o755)
    house.git("add", "skyrl/new.sh")
    house.git("commit", "-qm", "Add new\n\nWhy: ümlauts survive.\n\nOps: norm\nUpstream-status: sent\nDrop-when: never")
    house.tool("patches", "export", "skyrl")
    house.tool("patches", "check", "skyrl")
    assert "new file mode 100755" in house.patch("add-new.patch").read_text()


def test_a_patch_that_does_not_apply(house):
    """One message; the tree stands at the last good patch; undoing the edit lets the next run finish."""
    path = house.patch("add-two.patch")
    good = path.read_text()
    path.write_text(good.replace("-    return x + 8\n", "-    return x + 7\n"))
    message = house.tool("patches", "apply", "skyrl", ok=False)
    assert "a patch does not apply: skyrl/add-two.patch" in message and "skyrl/module.py" in message
    assert house.git("log", "--format=%s").split("\n")[0] == "Add one" and house.git("status", "--porcelain") == ""
    path.write_text(good)
    assert "1 applied anew" in house.tool("patches", "apply", "skyrl")


def test_series_file_and_folder_must_agree(house):
    house.patch("stray.patch").write_text("")
    assert "not listed: ['stray.patch']" in house.tool("patches", "apply", "skyrl", ok=False)


def test_status_names_both_directions(house):
    house.commit("Add three", "return x + 3\n", "return x + 300\n")
    house.patch("series").write_text("add-one.patch\n")
    house.patch("add-two.patch").unlink()
    assert "not in the series (export): Add three" in house.tool("patches", "status", "skyrl")


class TestCheck:
    def test_passes(self, house):
        assert "2 patches apply, export to themselves, and make build/cpu/skyrl" in house.tool("patches", "check", "skyrl")

    def test_works_without_a_built_tree(self, house):
        assert house.tool("build", "--clean") == ""
        assert "2 patches apply" in house.tool("patches", "check", "skyrl")

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("@@ -5,3 +5,3 @@", "@@ -4,3 +4,3 @@", "is not what exporting it gives"),  # an offset, which git forgives
            ("@@ -5,3 +5,3 @@", "@@ -5,3 +5,3 @@ def f1(x):", "is not what exporting it gives"),
            ("--- a/", "index 1234567..89abcde 100644\n--- a/", "is not what exporting it gives"),
            ("x + 100", "x + 101", "is not pristine files + series"),
            ("Drop-when: never\n", "", "`Drop-when:` is missing"),
            ("Subject: Add one", "Subject: Add 1", "is not what exporting it gives"),
            ("def f1(x):", "def f2(x):", "does not apply"),
        ],
    )
    def test_one_altered_patch(self, house, old, new, message):
        path = house.patch("add-one.patch")
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
        assert message in house.tool("patches", "check", "skyrl", ok=False)

    def test_edited_and_extra_files_in_the_built_tree(self, house):
        path = house.tree() / "skyrl" / "extra.py"
        path.write_text("")
        assert "skyrl/extra.py" in house.tool("patches", "check", "skyrl", ok=False)
        path.unlink()
        house.commit("Add three", "return x + 3\n", "return x + 300\n")
        assert "M\tskyrl/module.py" in house.tool("patches", "check", "skyrl", ok=False)
