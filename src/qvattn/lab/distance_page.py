"""What `qvattn distance` shows: how the heads of each run decay, and a log-log plot for every head."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import write_atomically
from . import page
from .distance import Line, summary

TITLES = (
    "run",
    "place",
    "keys",
    "heads closer to power law",
    "to exponential",
    "open",
    "exponent α",
    "half distance",
    "ln L ratio",
    "gap",
    "learned AGF p",
    "rank correlation p, α",
)
NOTES = (
    "Weights of a query over the keys at distances 1, 2, ... are rescaled to add up to one and fitted by p(d) ~ d^-α "
    "and by p(d) ~ exp(-λd), each normalised over the distances that the query has (maximum likelihood).",
    "ln L ratio: log-likelihood of the power law less that of the exponential, nats per query; median over the heads. "
    "A head counts as closer to one of them where the 95 % t-interval over sentences leaves out zero (Vuong's "
    "comparison, as in Clauset, Shalizi and Newman 2009). Closer does not mean close:",
    "gap: largest distance between cumulated weights of the better fit and the measured ones; median over the heads. "
    "0.05 is a good fit, 0.3 is none.",
    "α, half distance (at which the exponential has fallen to a half), p: median, least and largest over the heads.",
    "Left out of the fits: the query's own key, and the first key of a causal model or the last of an encoder; their "
    "weights are given under each plot.",
    "AGF multiplies the score by (1 + d/τ)^-p; that does not make the weights a power law, since the softmax comes "
    "after it. ALiBi, for comparison, does multiply the weights by an exponential.",
    "Attention shows where a head looks, not what the model uses.",
)
SHOWN = ("weight, with both fits", "weight as it is", "score q·k", "cosine of q and k")


def write_page(runs: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write the page for results of `distance.measure` (each with a `name`) to `path`, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lead = f"{len(runs)} model{'s' if len(runs) > 1 else ''}, {runs[0]['sentences']:,} sentences each"
    write_atomically(path, page.build(title, lead, [section(runs)]))


def section(runs: Sequence[dict[str, Any]]) -> page.Section:
    """The part of a page that shows these results."""
    found = [(place, side) for run in runs for place, one in run["places"].items() for side in _sides(one)]
    sides = list(dict.fromkeys(found))
    html = "".join(
        [
            "<h2>How attention falls with distance</h2>",
            page.table("Decay", TITLES, [_row(run["name"], line) for run in runs for line in summary(run)]),
            page.notes(NOTES),
            "<h2>Every head</h2><div class=controls>",
            page.select("run", "Run", [run["name"] for run in runs]),
            page.select("side", "Keys", [f"{place}, {side} keys" for place, side in sides]),
            page.select("shown", "Show", SHOWN),
            "</div><p class=lead>Dots: measured. Solid line: power law. Dashed line: exponential. Both axes are "
            "logarithmic for weights; the score is that before any table over distance.</p>",
            '<div class="figures heads" style="grid-template-columns:repeat(auto-fill,minmax(min(280px,100%),1fr))">',
            "</div>",
        ]
    )
    return page.Section(kind="distance", html=html, data={"runs": list(runs), "sides": sides})


def _sides(place: dict[str, Any]) -> list[str]:
    return [side for side in ("past", "future") if any(side in head for head in place["heads"])]


def cells(line: Line) -> tuple[str, ...]:
    """A line as texts, in the order of TITLES without the run."""
    return (
        line.place,
        line.side,
        str(line.power),
        str(line.exponential),
        str(line.open),
        _spread(line.alpha),
        _spread(line.half, "{:.1f}"),
        f"{line.ratio:+.3f}",
        f"{line.gap:.2f}",
        "–" if line.agf is None else _spread(line.agf),
        "–" if line.agreement is None else f"{line.agreement:+.2f}",
    )


def _spread(values: tuple[float, float, float], form: str = "{:.2f}") -> str:
    least, median, largest = (form.format(x) if x < 1e4 else "∞" for x in values)
    return f"{median} ({least} to {largest})"


def _row(name: str, line: Line) -> list[page.Cell]:
    agf = None if line.agf is None else line.agf[1]
    numbers = (line.power, line.exponential, line.open, line.alpha[1], line.half[1], line.ratio, line.gap, agf)
    keys = (line.place, line.side, *numbers, line.agreement)
    return [page.words(name), *(page.Cell(text=escape(t), key=k) for t, k in zip(cells(line), keys, strict=True))]
