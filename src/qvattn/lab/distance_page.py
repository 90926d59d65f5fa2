"""The page of `qvattn distance`: a summary, and per run a log-log plot for every head. Self-contained, works offline.

Everything that comes from data is escaped here or set as text by the script.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .distance import Line, summary
from .report import _POLICY, _asset, _script_json

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


def write_page(runs: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write the page for results of `distance.measure` (each with a `name`) to `path`, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, build_page(runs, title=title))


def build_page(runs: Sequence[dict[str, Any]], *, title: str) -> str:
    """The whole page as HTML text."""
    from plotly.offline import get_plotlyjs

    head = "".join(f"<th scope=col>{text}</th>" for text in TITLES)
    body = "".join(_row(run["name"], line) for run in runs for line in summary(run))
    notes = "".join(f"<li>{escape(note)}</li>" for note in NOTES)
    options = "".join(f'<option value="{i}">{escape(run["name"])}</option>' for i, run in enumerate(runs))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{_asset('report.css')}{_asset('affinity.css')}{_asset('distance.css')}</style></head><body><main>",
            f"<header><p class=brand>qvattn</p><h1>{escape(title)}</h1>"
            f"<p class=lead>{runs[0]['sentences']:,} sentences each: {escape(runs[0]['data'])}</p></header>",
            '<div class=scroll tabindex=0 role=region aria-label="Summary"><table class="summary plain">',
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>",
            f"<ul class=notes>{notes}</ul>",
            "<h2>Every head</h2>",
            f"<div class=controls><label>Run <select id=run>{options}</select></label>",
            "<label>Keys <select id=side></select></label>",
            '<label>Show <select id=what><option value="share">weight, with both fits</option>'
            '<option value="attention">weight as it is, own and left-out key included</option>'
            '<option value="score">score q·k before any table</option>'
            '<option value="cosine">cosine of query and key</option></select></label></div>',
            "<p class=lead>Dots: measured. Solid line: power law. Dashed line: exponential.</p>",
            "<div id=heads></div></main>",
            f"<script>{get_plotlyjs()}</script>",
            f'<script type="application/json" id="data">{_script_json(list(runs))}</script>',
            f"<script>{_asset('distance.js')}</script>",
            "</body></html>\n",
        ]
    )


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


def _row(name: str, line: Line) -> str:
    return f"<tr><th scope=row>{escape(name)}</th>" + "".join(f"<td>{text}</td>" for text in cells(line)) + "</tr>"
