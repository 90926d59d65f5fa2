"""What `qvattn affinity` shows: a summary, and per run a heat map for every head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomically
from . import page
from .affinity import Line, summary

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
    write_atomically(path, build_page(runs, title=title))


def build_page(runs: Sequence[dict[str, Any]], *, title: str) -> str:
    """The whole page as HTML text."""
    lead = f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {runs[0]['sentences']:,} validation sentences each"
    return page.build(title, lead, [section(runs)])


def section(runs: Sequence[dict[str, Any]]) -> page.Section:
    """The part of a page that shows these results."""
    options = [f"{run['name']}, seed {run['seed']}" for run in runs]
    found = summary(runs)  # empty where a tagger knows classes only
    rows = [_row(line) for line in found]
    html = "".join(
        [
            "<h2>Where heads look</h2>" + page.table("Affinity, summary", _TITLES, rows) + page.notes(_NOTES)
            if found
            else "",
            "<h2>Attention between word classes</h2>",
            f"<div class=controls>{page.select('run', 'Run', options)}",
            f"{page.switch('place', 'place', list(runs[0]['places']))}</div>",
            "<p class=lead>Rows: the querying word. Columns: the words attended to. A row adds up to 100 %.</p>",
            "<div class=heads></div>",
        ]
    )
    return page.Section(kind="affinity", html=html, data=list(runs))


def _row(line: Line) -> list[page.Cell]:
    return [
        page.words(line.name),
        page.words(line.place),
        page.words(line.relation),
        *(page.number(value, digits=1, scale=100) for value in (line.best_accuracy, line.best_mass, line.mean_mass)),
        page.number(line.chance, digits=1, scale=100),
        page.number(line.fit_effect, digits=1, scale=100, signed=True),
    ]
