"""What `qvattn extrapolate` shows: perplexity against the tokens in the window, and the tables behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import write_atomically
from . import page
from .extrapolation import Cell, Line

NOTES = (
    "The same tokens are scored at every length: {passages} passages of {scored} tokens of the {split} split, each "
    "token with at least half the window before it. Perplexity falls where more context is put to use.",
    "±: 95 % t-interval over seeds. Change: loss less that at the shortest length, nats per token, paired by seed. "
    "Difference: loss less that of {baseline} at the same length, paired by seed.",
    "Windows run over the ends of documents, as the blocks in training did; far context is often another document.",
)


def write_page(lines: Sequence[Line], results: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write the page for `extrapolation.summary` and what it summarises to `path`, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trained = ", ".join(str(n) for n in sorted({line.trained_length for line in lines}))
    lead = f"{len(lines)} variants, {len(results)} runs, trained on {trained} tokens"
    write_atomically(path, page.build(title, lead, [section(lines, results)]))


def section(lines: Sequence[Line], results: Sequence[dict[str, Any]]) -> page.Section:
    """The part of a page that shows these results."""
    settings = results[0]["settings"]
    baseline = next(line.name for line in lines if line.is_baseline)
    tables: tuple[tuple[str, Callable[[Cell], page.Cell]], ...] = (
        ("Perplexity", lambda cell: page.number(cell.perplexity)),
        ("Change of loss with length", lambda cell: page.number(cell.change, digits=3, signed=True)),
        (f"Difference of loss to {baseline}", lambda cell: page.number(cell.difference, digits=3, signed=True)),
    )
    titles = ("variant", *(f"{cell.length:,} tokens" for cell in lines[0].cells))
    html = "".join(
        [
            "<h2>Perplexity beyond the length of training</h2><div class='plot curves' style='height:480px'></div>",
            *(
                f"<h2>{escape(name)}</h2>"
                + page.table(name, titles, [[page.words(line.name), *map(make, line.cells)] for line in lines])
                for name, make in tables
            ),
            page.notes(note.format(**settings, baseline=baseline) for note in NOTES),
        ]
    )
    return page.Section(kind="extrapolation", html=html, data=[line.as_dict() for line in lines])
