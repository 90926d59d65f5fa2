"""What `qvattn diffusion` shows: verdicts on predictions, spread and separation by variant, heat maps by head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomically
from . import page
from .affinity import PLACES, RELATIONS
from .diffusion_summary import SEPARATION, SPREAD, Line, Verdict, lines, names, predictions

_LABELS = {
    "auc": "AUC",
    "rival_auc": "AUC, same class",
    "margin_before": "margin before",
    "d_prime_before": "d' before",
    "margin_after": "margin after",
    "d_prime_after": "d' after",
}
_NOTES = (
    "Groups: how many feature groups of its partners a query (or a key) answers to, exp of the entropy of the shares "
    "of its score variance; 8 groups in all. Rank: effective rank of the scores against partners as their features "
    "explain them. Words asked for: over how many words of the language a query's softmax would spread if each stood "
    "there once. Columns attended: over how many columns it did spread. Matched: the side that has to carry the match, "
    "the query where what it meets is the value itself, else the key. Means over all heads of the place.",
    "Right: the word modified, the modifiers, or the translation. AUC: chance that a right column scores above another "
    "word of the sentence, which the softmax cannot change. Margin: right less the strongest other word, as score or "
    "as weight. d': distance of the means in standard deviations. Of the head that does best on one half of the "
    "sentences, measured on the other half.",
    "Every number stays the same if queries are multiplied by any matrix and keys by its inverse.",
    "±: 95 % interval over seeds; differences are paired by seed. Intervals are not corrected for their number.",
)


def write_page(runs: Sequence[dict[str, Any]], path: Path, *, title: str, baseline: str) -> None:
    """Write the page for results of `diffusion.measure` to `path`, making its directory."""
    lead = f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {runs[0]['sentences']:,} validation sentences each"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.build(title, lead, [section(runs, baseline)]))


def section(runs: Sequence[dict[str, Any]], baseline: str) -> page.Section:
    """The part of a page that shows these results."""
    found = lines(runs, baseline)
    options = [f"{run['name']}, seed {run['seed']}" for run in runs]
    relations = [r for r in RELATIONS if any(line.relation == r for line in found)]
    html = "".join(
        [
            "<h2>Does the published explanation hold?</h2>",
            page.table("Predictions", _VERDICT_TITLES, (_verdict(one) for one in predictions(runs, baseline))),
            "<h2>How widely queries and keys spread</h2>",
            page.table("Spread", ("variant", "place", *SPREAD), _grid(found, None, tuple(SPREAD))),
            "<h2>How well the right partner stands out</h2>",
            page.table(
                "Separation",
                ("variant", "place", "right", *(_LABELS[name] for name in SEPARATION)),
                [row for relation in relations for row in _grid(found, relation, SEPARATION)],
            ),
            page.notes(_NOTES),
            "<h2>Every head: spread and separation</h2>",
            "<p class=lead>One dot a head: how diffuse its queries are, and the AUC of what it separates best.</p>",
            '<div class="plot scatter"></div>',
            "<h2>What a head matches</h2>",
            f"<div class=controls>{page.select('run', 'Run', options)}{page.switch('place', 'place', PLACES)}</div>",
            "<p class=lead>Share of score variance by feature group of the partner, %. A row adds up to 100 %.</p>",
            "<div class=figures>",
            "<figure><h3>Queries, by what they ask of keys</h3><div class='plot query'></div></figure>",
            "<figure><h3>Keys, by which queries they answer</h3><div class='plot key'></div></figure>",
            "<figure class=wide><h3>AUC of each head</h3><div class='plot auc'></div></figure></div>",
        ]
    )
    return page.Section(kind="diffusion", html=html, data={"runs": list(runs), "names": names(runs)})


_VERDICT_TITLES = ("variant", "predicted", "measure", "found", "came so")


def _verdict(one: Verdict) -> list[page.Cell]:
    tone = {"yes": "better", "the opposite": "worse"}.get(one.verdict, "")
    return [
        page.words(one.name),
        page.words(one.prediction),
        page.words(one.measure),
        page.number(one.found, digits=3, signed=True),
        page.Cell(text=one.verdict, key=one.verdict, kind=tone),
    ]


def _grid(found: Sequence[Line], relation: str | None, measures: Sequence[str]) -> list[list[page.Cell]]:
    rows = []
    for place in PLACES:
        here = [line for line in found if line.place == place and line.relation == relation]
        for name in dict.fromkeys(line.name for line in here):
            own = {line.measure: line for line in here if line.name == name}
            label = [page.words(relation)] if relation else []
            cells = [page.number(own[m].value if m in own else None) for m in measures]
            rows.append([page.words(name), page.words(place), *label, *cells])
    return rows
