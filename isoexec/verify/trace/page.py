"""A comparison as one HTML page that needs nothing else: no script, no font, no network. Standard library only."""

from __future__ import annotations

from html import escape
from itertools import groupby
from math import floor, log10

from isoexec.verify.trace.causes import CLASSES
from isoexec.verify.trace.compare import Divergence, layer_name
from isoexec.verify.trace.report import Report, as_json, element_lines, where

#: Tokens that the heat map shows; sequences that differ come first.
MOST_TOKENS = 1500
_DECADES = range(-8, 2)

_STYLE = """
:root { --ground: #fff; --ink: #1c2024; --dim: #667; --line: #d9dde3; --same: #b9d3ea; --other: #c8322f; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16181c; --ink: #e8eaed; --dim: #9aa3ad; --line: #343a42; --same: #35536e; --other: #ff6b61; --card: #1f2329; }
}
body { margin: 0 auto; max-width: 1100px; padding: 24px; background: var(--ground); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; }
.verdict { text-transform: uppercase; letter-spacing: .04em; } .divergent { color: var(--other); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 18px; margin-top: 16px; }
.card p { margin: 4px 0; } dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; margin: 0; } dt { color: var(--dim); }
dd { margin: 0; overflow-wrap: anywhere; } code, .mono { font: 13px/1.5 ui-monospace, monospace; }
.scroll { overflow-x: auto; } svg { display: block; } svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
.same { fill: var(--same); } .other { fill: var(--other); } .first { fill: none; stroke: var(--ink); stroke-width: 2; }
.axis { stroke: var(--line); } .key { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 14px; }
table { border-collapse: collapse; } th, td { text-align: left; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; } .dim { color: var(--dim); }
"""


def page(r: Report) -> str:
    """The page, as text."""
    parts = [_head(r), _card(r), _heat(r), _distribution(r), _tables(r)]
    title = escape(f"isoexec trace: {r.verdict}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(p for p in parts if p) + "\n</body></html>\n"
    )


def _head(r: Report) -> str:
    c = r.compared
    names = " and ".join(escape(side.name) for side in r.sides)
    tokens = f"{len(c.different)} of {len(c.tokens)} tokens differ somewhere" if c.rows else "nothing was compared"
    return (
        f'<header><h1 class="verdict {escape(r.verdict)}" id="verdict">{escape(r.verdict)}</h1>'
        f'<div class="dim">{names}: {tokens}; {c.stages} stages, {c.rows} rows of digests</div></header>'
    )


def _card(r: Report) -> str:
    if r.finding is None:
        return ""
    rows = [("class", CLASSES[r.finding.kind]), ("first", where(r))]
    if r.finding.inputs_differ is not None:
        rows.append(("inputs", "differ already: the cause is before this op" if r.finding.inputs_differ else "equal: the cause is here"))
    rows += [("why", why) for why in r.finding.why]
    if r.finding.element is not None:
        rows += [("element", text) for text in element_lines(r)]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return f'<section class="card" id="first"><dl>{items}</dl></section>'


def _heat(r: Report) -> str:
    """Layers by tokens; a run of tokens that fare alike is one rectangle."""
    tokens = _shown_tokens(r)
    if not tokens:
        return ""
    layers = sorted(r.compared.heat)
    cell = max(2.0, min(14.0, 960 / len(tokens)))
    left, top, height = 118, 22, 16
    width = left + cell * len(tokens) + 8
    shapes = []
    for row, layer in enumerate(layers):
        y = top + row * height
        shapes.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(layer_name(layer))}</text>')
        shapes += _row(r.compared.heat[layer], tokens, layer, left, y, cell, height)
    for start, sequence in _starts(tokens):
        x = left + start * cell
        shapes.append(f'<line class="axis" x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{top + len(layers) * height}"/>')
        shapes.append(f'<text x="{x + 2:.1f}" y="{top - 8}">{sequence}</text>')
    shapes.append(_marker(r, tokens, layers, left, top, cell, height))
    hidden = len(r.compared.tokens) - len(tokens)
    note = f" {hidden} tokens of other sequences are not shown." if hidden else ""
    return (
        '<h2>Layers by tokens</h2><p class="dim">Columns are tokens, in the order of their sequences (numbers on top).'
        f'{note}<span><i class="key" style="background:var(--same)"></i>equal'
        '<i class="key" style="background:var(--other)"></i>differs'
        '<i class="key" style="outline:2px solid var(--ink)"></i>first difference</span></p>'
        f'<div class="scroll"><svg id="heat" role="img" aria-label="which layers differ at which tokens" width="{width:.0f}" '
        f'height="{top + len(layers) * height + 8}">{"".join(shapes)}</svg></div>'
    )


def _shown_tokens(r: Report) -> list[tuple[int, int]]:
    by_sequence: dict[int, list] = {}
    for token in sorted(r.compared.tokens):
        by_sequence.setdefault(token[0], []).append(token)
    different = {sequence for sequence, _ in r.compared.different}
    chosen, room = [], MOST_TOKENS
    for sequence in sorted(by_sequence, key=lambda s: (s not in different, s)):
        if len(by_sequence[sequence]) <= room or not chosen:
            chosen += by_sequence[sequence][:room]
            room = MOST_TOKENS - len(chosen)
    return sorted(chosen)


def _row(heat: dict, tokens: list, layer: int, left: float, y: float, cell: float, height: float) -> list[str]:
    shapes = []
    states = [(token[0], heat.get(token)) for token in tokens]
    index = 0
    for (sequence, differs), run in groupby(states):
        length = len(list(run))
        if differs is not None:
            first, last = tokens[index][1], tokens[index + length - 1][1]
            said = f"{layer_name(layer)}, sequence {sequence}, positions {first} to {last}: {'differs' if differs else 'equal'}"
            shapes.append(
                f'<rect class="{"other" if differs else "same"}" x="{left + index * cell:.1f}" y="{y + 1}" width="{length * cell:.1f}" '
                f'height="{height - 2}"><title>{escape(said)}</title></rect>'
            )
        index += length
    return shapes


def _starts(tokens: list) -> list[tuple[int, int]]:
    return [(i, token[0]) for i, token in enumerate(tokens) if i == 0 or tokens[i - 1][0] != token[0]]


def _marker(r: Report, tokens: list, layers: list, left: float, top: float, cell: float, height: float) -> str:
    first = r.compared.first
    if not isinstance(first, Divergence) or first.where.layer not in layers or (first.sequence, first.position) not in tokens:
        return ""
    x, y = left + tokens.index((first.sequence, first.position)) * cell, top + layers.index(first.where.layer) * height
    return f'<rect class="first" id="first-token" x="{x - 1:.1f}" y="{y}" width="{cell + 2:.1f}" height="{height}"/>'


def _distribution(r: Report) -> str:
    """|difference| of logprobs, a row of bars for each case: exact zeros, then decades."""
    if not r.logprobs:
        return ""
    charts = "".join(_bars(case, values) for case, values in sorted(r.logprobs.items()))
    return (
        f'<h2>|difference| of logprobs, by case</h2><p class="dim">{escape(r.sides[0].name)} minus {escape(r.sides[1].name)}, in nats, '
        f'of generated tokens.</p><div id="distribution">{charts}</div>'
    )


def _bars(case: str, values: list[float]) -> str:
    labels = ["0", *(f"1e{d}" for d in _DECADES), "not finite"]
    counts = [0] * len(labels)
    for value in values:
        if value != value:
            counts[-1] += 1
        elif value == 0:
            counts[0] += 1
        else:
            decade = min(max(floor(log10(abs(value))), _DECADES[0]), _DECADES[-1])
            counts[1 + decade - _DECADES[0]] += 1
    step, height, base = 62, 70, 108
    shapes = [f'<text x="0" y="14">{escape(case)}: {len(values)} tokens</text>']
    for i, (label, count) in enumerate(zip(labels, counts)):
        size = max(height * count / len(values), 2 if count else 0)
        shapes.append(
            f'<rect class="{"same" if i == 0 else "other"}" x="{i * step + 8}" y="{base - size:.1f}" width="{step - 14}" '
            f'height="{size:.1f}">'
            f"<title>{escape(label)}: {count} tokens</title></rect>"
        )
        shapes.append(f'<text x="{i * step + step / 2 + 1}" y="{base + 14}" text-anchor="middle">{escape(label)}</text>')
        if count:
            shapes.append(f'<text x="{i * step + step / 2 + 1}" y="{base - size - 4:.1f}" text-anchor="middle">{count}</text>')
    shapes.append(f'<line class="axis" x1="0" y1="{base}" x2="{step * len(labels)}" y2="{base}"/>')
    return f'<div class="scroll"><svg width="{step * len(labels)}" height="{base + 22}">{"".join(shapes)}</svg></div>'


def _tables(r: Report) -> str:
    data = as_json(r)
    rows = "".join(
        f"<tr><td>{escape(s['name'])}</td><td>{escape(s['level'])}</td><td>{escape(', '.join(s['cases']))}</td></tr>" for s in data["sides"]
    )
    about = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in data["about"].items())
    notes = "".join(f"<li>{escape(note)}</li>" for note in data["notes"])
    found = f"<h2>Sides</h2><table><tr><th>side</th><th>level</th><th>cases</th></tr>{rows}</table>"
    found += f"<h2>About</h2><dl>{about}</dl>" if about else ""
    return found + (f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
