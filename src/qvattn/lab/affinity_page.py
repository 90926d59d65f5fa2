"""The page of `qvattn affinity`: a summary, and per run a heat map for every head. Self-contained, works offline.

Everything that comes from data is escaped here or set as text by the script.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from .affinity import Line, summary
from .report import _POLICY, _asset, _script_json
from .statistics import Estimate

_TITLES = (
    "variant",
    "place",
    "looks for",
    "best head finds it %",
    "its mass %",
    "mean mass %",
    "chance %",
    "fit effect",
)
_NOTES = (
    "Looks for: head, the word that the query modifies; modifiers, the words that modify it; partner, its translation.",
    "Best head: the head of the highest accuracy on these sentences. It finds what it looks for where its heaviest "
    "column, sentence end included, is a right one. Mass: its attention on right columns. Mean mass: of the average "
    "head.",
    "Chance: uniform attention over all visible columns.",
    "Fit effect: percentage points of attention, averaged over heads, on the word that is modified where the two go "
    "together, less where they do not.",
    "In decoder and cross, the query is the word about to be written; decoder columns are the words already written, "
    "so a head or modifier that comes later is not asked for.",
    "±: 95 % interval over seeds, where there are several. Attention shows where a head looks, not what the model "
    "uses.",
)


def write_page(runs: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write the page for results of `affinity.measure` to `path`, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(build_page(runs, title=title), encoding="utf-8")


def build_page(runs: Sequence[dict[str, Any]], *, title: str) -> str:
    """The whole page as HTML text."""
    from plotly.offline import get_plotlyjs

    head = "".join(f"<th scope=col><button type=button>{text}</button></th>" for text in _TITLES)
    body = "".join(_row(line) for line in summary(runs))
    notes = "".join(f"<li>{escape(note)}</li>" for note in _NOTES)
    options = "".join(
        f'<option value="{i}">{escape(run["name"])}, seed {run["seed"]}</option>' for i, run in enumerate(runs)
    )
    places = "".join(
        f'<button type=button data-place="{place}" aria-pressed="{str(i == 0).lower()}">{place}</button>'
        for i, place in enumerate(runs[0]["places"])
    )
    sentences = ", ".join(f"{run['sentences']:,}" for run in runs[:1])
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{_asset('report.css')}{_asset('affinity.css')}</style></head><body><main>",
            f"<header><p class=brand>qvattn</p><h1>{escape(title)}</h1>"
            f"<p class=lead>{len(runs)} run{'s' if len(runs) > 1 else ''}, {sentences} validation sentences each</p>"
            "</header>",
            '<div class=scroll tabindex=0 role=region aria-label="Summary"><table class="summary sortable">',
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>",
            f"<ul class=notes>{notes}</ul>",
            "<h2>Attention between word classes</h2>",
            f"<div class=controls><label>Run <select id=run>{options}</select></label>"
            f"<div class=switch role=group aria-label=place>{places}</div></div>",
            "<p class=lead>Rows: the querying word. Columns: the words attended to. A row adds up to 100 %.</p>",
            "<div id=heads></div></main>",
            f"<script>{get_plotlyjs()}</script>",
            f'<script type="application/json" id="data">{_script_json(list(runs))}</script>',
            f"<script>{_asset('affinity.js')}</script>",
            "</body></html>\n",
        ]
    )


def _row(line: Line) -> str:
    cells: list[tuple[str, float | str]] = [
        (line.place, line.place),
        (line.relation, line.relation),
        *(_cell(value) for value in (line.best_accuracy, line.best_mass, line.mean_mass)),
        (f"{100 * line.chance:.1f}", line.chance),
        _cell(line.fit_effect, signed=True),
    ]
    texts = "".join(f'<td data-key="{escape(str(key))}">{text}</td>' for text, key in cells)
    return f'<tr><th scope=row data-key="{escape(line.name)}">{escape(line.name)}</th>{texts}</tr>'


def _cell(value: Estimate | None, *, signed: bool = False) -> tuple[str, float | str]:
    if value is None:
        return "–", ""
    bar = "" if value.half_width is None else f" <small>± {100 * value.half_width:.1f}</small>"
    return f"{100 * value.mean:{'+' if signed else ''}.1f}{bar}", value.mean
