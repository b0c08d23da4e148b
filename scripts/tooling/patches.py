"""scripts/patches: move patches between patches/<tree>/ and the commits of build/<backend>/<tree>.

    scripts/patches apply  [TREE...]    make the build tree upstream + series
    scripts/patches export [TREE...]    write the build tree's commits as the series
    scripts/patches status [TREE...]    where both stand
    scripts/patches check  [TREE...]    prove series, export and built tree agree, from the pinned archives
    scripts/patches rebase TREE VERSION move the series to another release of the tree

To change upstream code: commit in build/<backend>/<tree>, one concern per commit, then export (CONTRIBUTING.md, "Add or change a patch").
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pins as pins_module
import proof
import rebase as rebase_module
from common import ROOT, Stop, main
from pins import Tree
from series import Series, refuse_faults
from trees import BuildTree, apply_series


def backend_with_trees(wanted: str | None) -> str:
    """The backend whose trees are meant: the one named, else the only one built, else cpu."""
    wanted = wanted or os.environ.get("BACKEND", "auto")
    if wanted != "auto":
        return wanted
    built = [path.parent.name for path in sorted((ROOT / "build").glob("*/vllm"))]
    return built[0] if len(built) == 1 else "cpu"


def apply(names: list[str], backend: str, discard: bool) -> None:
    for name in names:
        tree, series = BuildTree(name, ROOT / "build" / backend / name), Series.of(name)
        count = apply_series(tree, series, discard=discard)
        print(f"{name}: {len(series.names())} patches, {count} applied anew")


def export(names: list[str], backend: str, source: Path | None = None) -> None:
    for name in names:
        tree, series = BuildTree(name, source or ROOT / "build" / backend / name), Series.of(name)
        tree.require()
        if edited := tree.edited():
            raise Stop(f"{tree.path} has edits that are in no commit", expected="all work committed, one concern per commit",
                       found="\n".join(edited), do="commit them (git commit, git commit --fixup) or undo them, then export")
        patches = tree.patches()
        refuse_faults([(patch.file_name, patch) for patch in patches], name)
        if not patches and not series.folder.exists():
            print(f"{name}: no patches")
            continue
        changed = series.write(patches)
        tree.mark_applied()
        print(f"{name}: {len(patches)} patches, " + (", ".join(changed) if changed else "unchanged"))


def status(names: list[str], backend: str) -> None:
    for name in names:
        tree, series = BuildTree(name, ROOT / "build" / backend / name), Series.of(name)
        listed = series.texts()
        print(f"{name}: {len(listed)} patches in patches/{name}")
        if not tree.exists():
            print(f"  build/{backend}/{name}: not built")
            continue
        in_tree = [patch.text for patch in tree.patches()]
        for title, lines in {
            "in the series, not in the tree (apply)": [f for f, text in listed if text not in in_tree],
            "in the tree, not in the series (export)": tree.unexported(series),
            "edited, not committed": tree.edited(),
        }.items():
            for line in lines:
                print(f"  {title}: {line}")
        if in_tree == [text for _, text in listed]:
            print(f"  build/{backend}/{name}: upstream + series")


def check(trees: list[Tree], backend: str) -> None:
    for tree in trees:
        print(proof.check(tree, Series.of(tree.name), BuildTree(tree.name, ROOT / "build" / backend / tree.name)), flush=True)


def rebase(tree: Tree, version: str, archive: Path | None, write: bool) -> int:
    """Exit status 1 if a patch conflicts."""
    archive = archive or rebase_module.other_release(tree, version)
    series = Series.of(tree.name)
    work, outcomes = rebase_module.rebase(tree, series, version, archive)
    conflict = any(outcome.conflicts for outcome in outcomes)
    if write and not conflict:
        series.write(work.patches())
    print(rebase_module.report(tree, version, archive, work, outcomes, write))
    return int(conflict)


def parse_arguments(arguments: list[str], tree_names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/patches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("apply", "export", "status", "check"):
        sub = verbs.add_parser(verb)
        sub.add_argument("trees", nargs="*", default=tree_names, metavar="TREE", help="default: all")
        sub.add_argument("--backend", help="whose trees (default: $BACKEND, else the one that is built)")
        if verb == "apply":
            sub.add_argument("--discard", action="store_true", help="drop work in the tree that is not in the series")
        if verb == "export":
            sub.add_argument("--from", dest="source", type=Path, help="export this repository (a rebase's) instead of the build tree")
    sub = verbs.add_parser("rebase")
    sub.add_argument("tree", metavar="TREE")
    sub.add_argument("version", metavar="VERSION")
    sub.add_argument("--archive", type=Path, help="the release's source archive (default: from .cache or the package index)")
    sub.add_argument("--write", action="store_true", help="if every patch moves, put the moved series into patches/")
    return parser.parse_args(arguments)


def run(arguments: list[str]) -> int:
    pins = pins_module.load()
    options = parse_arguments(arguments, list(pins.trees))
    if options.verb == "rebase":
        return rebase(pins.tree(options.tree), options.version, options.archive, options.write)
    trees = [pins.tree(name) for name in options.trees]
    names = [tree.name for tree in trees]
    backend = backend_with_trees(options.backend)
    match options.verb:
        case "apply":
            apply(names, backend, options.discard)
        case "export":
            if options.source and len(names) != 1:
                raise Stop("--from is one tree's repository", expected="one TREE", found=" ".join(names), do="name the tree")
            export(names, backend, options.source)
        case "status":
            status(names, backend)
        case "check":
            check(trees, backend)
    return 0


if __name__ == "__main__":
    main(run)
