"""``isoexec trace``: its verbs. ``compare`` needs the standard library only."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from isoexec.contract import ContractError
from isoexec.contract.canonical import printable
from isoexec.verify.arguments import check_model, dtype_note, positive
from isoexec.verify.folder import alone
from isoexec.verify.trace.page import page
from isoexec.verify.trace.report import Report, as_json, lines, open_report

_STATUSES = """exit status:
  0  identical: every digest that both sides have agrees
  1  divergent: some token differs; the first one, its op and its cause are named
  2  bad input: a file that is no bundle, a model that cannot be traced
  3  inconclusive: the sides share no token and stage, or a process died
"""


def add_verbs(parser, formatter) -> None:
    """Add ``run`` and ``compare`` below the parser of ``trace``; ``formatter`` keeps the lines of a text."""
    parser.description = "Find the first different bit between the rollout engine and the trainer: op, layer, token, element and cause."
    parser.formatter_class, parser.epilog = formatter, _STATUSES
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    run = verbs.add_parser("run", help="run both sides on the same tokens, record every op and compare", formatter_class=formatter)
    run.epilog = _STATUSES
    run.add_argument("--model", metavar="FOLDER", help="HF-format checkpoint (default: a small random one is made)")
    run.add_argument("--trainer-model", metavar="FOLDER", help="checkpoint of the trainer, if another, e.g. of a stale sync")
    run.add_argument(
        "--mismatch", type=Path, metavar="FOLDER", help="a training run's mismatch-<step>: its sequence, on both sides' weights of that step"
    )
    run.add_argument(
        "--architecture", default="Qwen3ForCausalLM", metavar="NAME", help="of the checkpoint that is made (default: %(default)s)"
    )
    run.add_argument("--prompts", type=int, default=8, metavar="N", help="prompts of 1 to 300 tokens (default: %(default)s)")
    run.add_argument("--tokens", type=int, default=8, metavar="N", help="new tokens for each prompt (default: %(default)s)")
    run.add_argument("--temperature", type=positive, default=1.0, metavar="T", help="of both sides (default: %(default)s)")
    run.add_argument("--trainer-temperature", type=positive, metavar="T", help="of the trainer, if another")
    run.add_argument(
        "--pass", dest="scoring", choices=("score", "forward", "recompute"), default="score", help="of the trainer (default: %(default)s)"
    )
    run.add_argument(
        "--level",
        choices=("layers", "ops", "state"),
        default="state",
        help="layers: the residual stream only; ops: every op; state: also caches and recurrent states (default: %(default)s)",
    )
    run.add_argument("--cuda-graphs", action="store_true", help="capture the engine's decode steps, on a GPU; for levels layers and ops")
    run.add_argument("--timeout", type=positive, default=600.0, metavar="SECONDS", help="longest wait for one answer of a process")
    run.add_argument(
        "--out", default="out", metavar="FOLDER", help="for logs, and for the bundle where --bundle is not given (default: out)"
    )
    run.add_argument("--bundle", type=Path, metavar="FILE", help="where to write the bundle (default: OUT/trace.zip)")
    run.set_defaults(run=_run)

    compare = verbs.add_parser("compare", help="compare the two sides of a bundle, on any machine", formatter_class=formatter)
    compare.epilog = "Needs neither torch nor a framework.\n\n" + _STATUSES
    compare.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE", help="one with two sides, or two with one side each")
    compare.set_defaults(run=_compare)
    for verb in (run, compare):
        verb.add_argument("--json", action="store_true", help="print JSON")
        verb.add_argument("--html", type=Path, metavar="FILE", help="also write one self-contained HTML page")


def _check_outputs(*files: Path | None) -> None:
    """Refuse a file that cannot be written while nothing is lost by it."""
    for file in files:
        if file and (file.is_dir() or not file.parent.is_dir()):
            raise ContractError(f"trace: {file}: expected a file in a folder that exists")


def _compare(options) -> int:
    _check_outputs(options.html)
    if options.html and any(options.html.absolute() == file.absolute() for file in options.bundles):
        raise ContractError(f"trace compare: --html {options.html} is a bundle to compare, which the page would replace; name another file")
    if len(options.bundles) > 2:
        raise ContractError(f"trace compare: expected one or two bundles, found {len(options.bundles)}")
    return _show(open_report(options.bundles), options)


def _run(options) -> int:
    _check_outputs(options.html, options.bundle)
    for name, value in (("prompts", options.prompts), ("tokens", options.tokens)):
        if value < 1:
            raise ContractError(f"--{name} {value}: expected at least 1")
    if options.cuda_graphs and options.level == "state":
        raise ContractError("--cuda-graphs: expected --level layers or ops: what caches hold is read by host code, which no replay runs")
    for model in (options.model, options.trainer_model):
        if model is not None and (note := dtype_note(check_model(model))):
            print(f"isoexec: note: {note}", file=sys.stderr)
    with alone(Path(options.out)):
        from isoexec.verify.trace.session import run

        found, file, notes = run(options)
    if found is None:
        return 3
    status = _show(found, options)
    for note in notes:
        print(f"  note       {note}", file=sys.stderr if options.json else sys.stdout)
    if not options.json:
        print(f"  bundle     {file}; read it anywhere with: isoexec trace compare {file.name} --html trace.html")
    return status


def _show(found: Report, options) -> int:
    if options.html:
        options.html.write_text(page(found), encoding="utf-8", errors="xmlcharrefreplace")
    if options.json:
        print(json.dumps(as_json(found), indent=2, sort_keys=True))
    else:
        print("\n".join(map(printable, lines(found))))
    return found.status
