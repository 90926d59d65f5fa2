"""What associative recall looks like: a dot for every seed, since runs mostly solve the task or do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..files import write_atomically
from . import page
from .recall import SOLVED, RecallRow

_NOTES = (
    "Recall: share of questions answered with the right value, on validation rows after the last step.",
    f"A run counts as having solved the task from {SOLVED:.0%}. Solved at step: the first validation at which it had.",
    "Dotted line: a model that knows which values occur in its row but not to which keys they belong.",
    "A run mostly solves the task or stays near that line, so the mean over a few seeds says little and its interval "
    "is wide; how many seeds solved it says more. Why the others failed, it does not say.",
)


def write_page(rows: Sequence[RecallRow], path: Path, *, title: str) -> None:
    """Write the page for rows of `recall.recall_rows` to `path`, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seeds = sorted({seed for row in rows for seed in row.accuracy})
    lead = f"{len(rows)} variants, seeds {', '.join(map(str, seeds))}"
    write_atomically(path, page.build(title, lead, [section(rows)]))


def section(rows: Sequence[RecallRow]) -> page.Section:
    """The part of a page that shows these rows."""
    seeds = sorted({seed for row in rows for seed in row.accuracy})
    titles = ("variant", "cache", *(f"seed {seed} %" for seed in seeds), "mean %", "solved", "solved at step")
    html = "".join(
        [
            "<h2>Associative recall</h2>",
            page.table("Recall", titles, (_row(row, seeds) for row in rows)),
            page.notes(_NOTES),
            "<div class=figures><figure class=wide><h3>Every seed</h3><div class='plot seeds'></div></figure></div>",
        ]
    )
    return page.Section(kind="recall", html=html, data=[row.as_dict() for row in rows])


def _row(row: RecallRow, seeds: Sequence[int]) -> list[page.Cell]:
    return [
        page.words(row.name),
        page.number(row.cache_elements, digits=0),
        *(page.number(row.accuracy.get(seed), digits=1, scale=100) for seed in seeds),
        page.number(row.mean, digits=1, scale=100),
        page.Cell(text=f"{row.solved} of {len(row.accuracy)}", key=row.solved),
        page.words(", ".join(str(row.solved_at.get(seed, "–")) for seed in row.accuracy)),
    ]
