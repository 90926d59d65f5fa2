"""What `qvattn operators` shows: a table, residual against cache, and heat maps by layer and head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_atomically
from . import page

_NOTES = (
    "Residual: |M - M'| / |M| (Frobenius) of the nearest operator that the other way of making keys could represent; "
    "0 is exact, 1 is nothing. Mean over heads, and the range. Queries are free in all rows.",
    "Rows marked values kept make keys from the model's own values as they are; the others leave the values alone and "
    "choose the best keys. Cache: elements a token and layer, values included.",
    "Offset 0: the operator without rotation. Every offset: mean over all rotations of RoPE, where keys made anew are "
    "rotated on read and pairs of different frequencies cannot stand in for each other. Weighed: by the second moments "
    "of the inputs that the layer reads on a text, so that the squared norm is a mean squared score.",
    "Random: the same for random factors of these sizes, which share keys and values as the model does. A trained "
    "model well below it has something of this kind already.",
    "Context rows are an upper bound: the shared context is found by alternating least squares.",
    "A residual says how far weights are from what they would have to be, not what a model loses; training can change "
    "values and queries as well.",
)


def write_page(found: dict[str, Any], path: Path) -> None:
    """Write the page for the result of `operators.measure` to `path`, making its directory."""
    heads = sum(len(layer["shared"]) for layer in found["layers"])
    lead = f"{found['model']}: {len(found['layers'])} attention layers, {heads} heads"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.build("Operator freedom", lead, [section(found)]))


def section(found: dict[str, Any]) -> page.Section:
    """The part of a page that shows this result."""
    measures = list(found["summary"][0]["residual"])
    random = list(found["summary"][0]["random"])
    titles = ("keys", "cache a token and layer", "values kept", *measures, *(f"random, {name}" for name in random))
    names = [row["name"] for row in found["summary"]]
    html = "".join(
        [
            "<h2>What other ways of making keys could represent</h2>",
            page.table("Residuals", titles, (_row(row, measures, random) for row in found["summary"])),
            page.notes(_NOTES),
            f"<div class=controls>{page.switch('measure', 'measure', measures)}</div>",
            "<div class=figures>",
            "<figure class=wide><h3>Residual against cache</h3><div class='plot front'></div></figure></div>",
            "<h2>Head by head</h2>",
            f"<div class=controls>{page.select('keys', 'Keys', names)}</div>",
            "<div class=figures><figure><h3>Residual, layer by head</h3><div class='plot residual'></div></figure>",
            "<figure><h3>Effective rank, layer by head</h3><div class='plot rank'></div></figure></div>",
            _angles(found),
        ]
    )
    return page.Section(kind="operators", html=html, data=found)


def _row(row: dict[str, Any], measures: list[str], random: list[str]) -> list[page.Cell]:
    cells = []
    for measure in measures:
        one = row["residual"][measure]
        text = f"{one['mean']:.3f} <small>{one['least']:.2f} to {one['most']:.2f}</small>"
        cells.append(page.Cell(text=text, key=one["mean"]))
    kept = "yes" if row["keeps_values"] else "no"
    cells += [page.number(row["random"][name], digits=3) for name in random]
    return [page.words(row["name"]), page.Cell(text=f"{row['cache']:,}", key=row["cache"]), page.words(kept), *cells]


def _angles(found: dict[str, Any]) -> str:
    rows = [_angle_row(layer) for layer in found["layers"] if layer["angles"]]
    if not rows:
        return ""
    titles = ("layer", "pairs", "smallest", "median", "largest", "overlap", "chance", "operators alike")
    return (
        "<h2>Heads that share a key</h2>"
        "<p class=lead>Principal angles in degrees between their query spaces, means over pairs of heads.</p>"
        + page.table("Angles", titles, rows)
        + page.notes(
            (
                "Overlap: mean squared cosine, 1 if both heads read the same space; chance: of random spaces of these "
                "sizes. Operators alike: mean size of the cosine between the two operators as vectors.",
            )
        )
    )


def _angle_row(layer: dict[str, Any]) -> list[page.Cell]:
    def mean(name: str) -> float:
        return float(np.mean([abs(one[name]) for one in layer["angles"]]))

    label = f"{layer['place']} {layer['layer'] + 1}"
    degrees = [page.number(mean(name), digits=1) for name in ("smallest", "median", "largest")]
    shares = [page.number(mean(name), digits=3) for name in ("overlap", "chance", "alike")]
    return [page.Cell(text=label, key=label), page.number(len(layer["angles"]), digits=0), *degrees, *shares]
