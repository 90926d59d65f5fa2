"""The page of `qvattn extrapolate`: perplexity against the tokens in the window. Self-contained, works offline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .extrapolation import Cell, Line
from .report import _POLICY, _asset, _script_json
from .statistics import Estimate

NOTES = (
    "The same tokens are scored at every length: the last {scored} of each of {windows} windows of the {split} split. "
    "A longer window shows more of what came before them, so perplexity falls where context is put to use.",
    "±: 95 % t-interval over seeds. Change: loss less that at the shortest length, nats per token, paired by seed. "
    "Difference: loss less that of {baseline} at the same length, paired by seed.",
    "Windows run over the ends of documents, as the blocks in training did; far context is often another document.",
)


def write_page(lines: Sequence[Line], results: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write the page for `extrapolation.summary` and what it summarises to `path`, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, build_page(lines, results, title=title))


def build_page(lines: Sequence[Line], results: Sequence[dict[str, Any]], *, title: str) -> str:
    """The whole page as HTML text."""
    from plotly.offline import get_plotlyjs

    settings = results[0]["settings"]
    baseline = next(line.name for line in lines if line.is_baseline)
    notes = "".join(f"<li>{escape(note.format(**settings, baseline=baseline))}</li>" for note in NOTES)
    trained = ", ".join(str(n) for n in sorted({line.trained_length for line in lines}))
    tables = (
        ("Perplexity", _table(lines, lambda cell: _text(cell.perplexity, "{:.2f}"))),
        ("Change of loss with length", _table(lines, lambda cell: _text(cell.change, "{:+.3f}"))),
        (f"Difference of loss to {baseline}", _table(lines, lambda cell: _text(cell.difference, "{:+.3f}"))),
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{_asset('report.css')}{_asset('distance.css')}</style></head><body><main>",
            f"<header><p class=brand>qvattn</p><h1>{escape(title)}</h1>"
            f"<p class=lead>{len(lines)} variants, {len(results)} runs, trained on {trained} tokens</p></header>",
            "<figure class=wide><div id=curves class=plot></div></figure>",
            *(
                f"<h2>{escape(name)}</h2><div class=scroll tabindex=0 role=region>{table}</div>"
                for name, table in tables
            ),
            f"<ul class=notes>{notes}</ul></main>",
            f"<script>{get_plotlyjs()}</script>",
            f'<script type="application/json" id="data">{_script_json([line.as_dict() for line in lines])}</script>',
            f"<script>{_asset('extrapolation.js')}</script>",
            "</body></html>\n",
        ]
    )


def _table(lines: Sequence[Line], text: Callable[[Cell], str]) -> str:
    head = "".join(f"<th scope=col>{cell.length:,} tokens</th>" for cell in lines[0].cells)
    rows = "".join(
        f"<tr{' class=baseline' if line.is_baseline else ''}><th scope=row>{escape(line.name)}</th>"
        + "".join(f"<td>{text(cell)}</td>" for cell in line.cells)
        + "</tr>"
        for line in lines
    )
    return (
        f'<table class="summary plain numbers"><thead><tr><th scope=col>variant</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _text(value: Estimate | None, form: str) -> str:
    if value is None or not math.isfinite(value.mean):
        return "–"
    bar = "" if value.half_width is None else f" <small>± {form.replace('+', '').format(value.half_width)}</small>"
    return form.format(value.mean) + bar
