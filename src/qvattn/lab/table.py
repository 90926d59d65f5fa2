"""The columns of a comparison, written once, and the table as Markdown and for the terminal.

Must never compute a number: what is shown is in the `Comparison`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from qvattn.lab.statistics import Estimate
from qvattn.lab.summary import Comparison, Row

MISSING = "–"
MARKDOWN_NAME = "compare.md"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: its title, the text of a row, and the number that it sorts by (None sorts last).

    `rank` says which columns a narrow terminal leaves out first: those of the highest rank.
    """

    title: str
    short: str
    rank: int
    hint: str
    text: Callable[[Row], str]
    key: Callable[[Row], float | str | None]
    optional: bool = False


COLUMNS: tuple[Column, ...] = (
    Column(
        title="variant",
        short="variant",
        rank=0,
        hint="name of the variant",
        text=lambda r: r.name,
        key=lambda r: r.name,
    ),
    Column(
        title="valid. accuracy %",
        short="accuracy %",
        rank=0,
        hint="validation token accuracy, mean over seeds ± half of its 95 % interval",
        text=lambda r: percent(r.accuracy),
        key=lambda r: _mean(r.accuracy),
    ),
    Column(
        title="Δ to baseline",
        short="Δ",
        rank=1,
        hint="difference in validation token accuracy to the baseline, percentage points, paired by seed",
        text=lambda r: "baseline" if r.is_baseline else percent(r.difference, sign=True),
        key=lambda r: 0.0 if r.is_baseline else _mean(r.difference),
    ),
    Column(
        title="perplexity",
        short="ppl",
        rank=4,
        hint="validation perplexity, unsmoothed, mean over seeds",
        text=lambda r: number(r.perplexity, 2),
        key=lambda r: _mean(r.perplexity),
    ),
    Column(
        title="test accuracy %",
        short="test acc. %",
        rank=8,
        hint="test token accuracy, mean over seeds ± half of its 95 % interval",
        text=lambda r: percent(r.test_accuracy),
        key=lambda r: _mean(r.test_accuracy),
        optional=True,
    ),
    Column(
        title="BLEU",
        short="BLEU",
        rank=5,
        hint="sacreBLEU on the test set, mean over seeds",
        text=lambda r: number(r.bleu, 2),
        key=lambda r: _mean(r.bleu),
        optional=True,
    ),
    Column(
        title="chrF",
        short="chrF",
        rank=9,
        hint="chrF on the test set, mean over seeds",
        text=lambda r: number(r.chrf, 2),
        key=lambda r: _mean(r.chrf),
        optional=True,
    ),
    Column(
        title="parameters",
        short="params",
        rank=6,
        hint="all parameters",
        text=lambda r: whole(r.parameters_total),
        key=lambda r: r.parameters_total,
    ),
    Column(
        title="attention parameters",
        short="in attention",
        rank=7,
        hint="parameters in attention",
        text=lambda r: whole(r.parameters_attention),
        key=lambda r: r.parameters_attention,
    ),
    Column(
        title="cache / token·layer",
        short="cache",
        rank=2,
        hint="elements cached per token in each decoder self-attention layer",
        text=lambda r: whole(r.cache_elements_per_token_layer),
        key=lambda r: r.cache_elements_per_token_layer,
    ),
    Column(
        title="cache share",
        short="share",
        rank=3,
        hint="cached elements as a share of the baseline's",
        text=lambda r: MISSING if r.cache_share is None else f"{100 * r.cache_share:.0f} %",
        key=lambda r: r.cache_share,
    ),
    Column(
        title="train tokens/s",
        short="train tok/s",
        rank=3,
        hint="target tokens per second in training, median over seeds",
        text=lambda r: whole(r.train_tokens_per_second),
        key=lambda r: r.train_tokens_per_second,
    ),
    Column(
        title="decode tokens/s",
        short="decode tok/s",
        rank=6,
        hint="new tokens per second of greedy decoding, 32 rows at once, median over seeds",
        text=lambda r: whole(r.decode_tokens_per_second),
        key=lambda r: r.decode_tokens_per_second,
        optional=True,
    ),
    Column(
        title="seeds",
        short="seeds",
        rank=4,
        hint="number of finished seeds",
        text=lambda r: str(len(r.seeds)),
        key=lambda r: float(len(r.seeds)),
    ),
)


def columns_of(comparison: Comparison) -> list[Column]:
    """The columns that this comparison has something for."""
    return [
        column
        for column in COLUMNS
        if not column.optional or any(column.key(row) is not None for row in comparison.rows)
    ]


def percent(value: Estimate | None, *, sign: bool = False) -> str:
    """A fraction in percent with its interval: `48.93 ± 0.21`, with a sign `−0.43 ± 0.12`."""
    if value is None:
        return MISSING
    mean = f"{100 * value.mean:+.2f}" if sign else f"{100 * value.mean:.2f}"
    text = mean.replace("-", "−")
    return text if value.half_width is None else f"{text} ± {100 * value.half_width:.2f}"


def number(value: Estimate | None, digits: int) -> str:
    """The mean alone."""
    return MISSING if value is None else f"{value.mean:.{digits}f}"


def whole(value: float | None) -> str:
    """A whole number with thin groups of three."""
    return MISSING if value is None else f"{value:,.0f}".replace(",", "\u202f")


def markdown(comparison: Comparison) -> str:
    """The comparison as a Markdown page: title, table, failed runs, notes, provenance."""
    columns = columns_of(comparison)
    lines = [f"# {_markdown_cell(comparison.title)}", ""]
    lines.append("| " + " | ".join(column.title for column in columns) + " |")
    lines.append("|" + "|".join(":--" if index == 0 else "--:" for index in range(len(columns))) + "|")
    for row in comparison.rows:
        lines.append("| " + " | ".join(_markdown_cell(column.text(row)) for column in columns) + " |")
    for failure in comparison.failed:
        text = f"**Failed**: {failure.name}, seed {failure.seed}: {failure.reason} (log: {failure.log})"
        lines += ["", _markdown_cell(text, keep_stars=True)]
    lines += ["", *(f"- {_markdown_cell(note)}" for note in comparison.notes)]
    lines += [f"- {label}: {_markdown_cell(text)}" for label, text in provenance_lines(comparison)]
    return "\n".join(lines) + "\n"


def provenance_lines(comparison: Comparison) -> list[tuple[str, str]]:
    """Label and text of how the comparison came about."""
    lines = [("seeds", ", ".join(map(str, comparison.seeds)) or "none")]
    for label, value in comparison.provenance.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        lines.append((label.replace("_", " "), text))
    return lines


def terminal_table(comparison: Comparison, width: int) -> Table:
    """The comparison as a rich table at most `width` characters wide, if leaving columns out can make it so."""
    columns = columns_of(comparison)
    console = Console(width=1000)
    while True:
        table = _terminal_table(comparison, columns)
        highest = max(columns, key=lambda column: column.rank)
        if highest.rank == 0 or Measurement.get(console, console.options, table).maximum <= width:
            return table
        columns = [column for column in columns if column is not highest]


def _terminal_table(comparison: Comparison, columns: Sequence[Column]) -> Table:
    left_out = len(columns_of(comparison)) - len(columns)
    table = Table(
        title=escape(comparison.title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    if left_out:
        table.caption = f"{left_out} more column{'' if left_out == 1 else 's'} in {MARKDOWN_NAME}"
        table.caption_justify = "left"
    for index, column in enumerate(columns):
        table.add_column(column.short, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in comparison.rows:
        table.add_row(*(escape(column.text(row)) for column in columns))
    return table


def _mean(value: Estimate | None) -> float | None:
    return None if value is None else value.mean


def _markdown_cell(text: str, *, keep_stars: bool = False) -> str:
    special = r"([\\`|<>\[\]])" if keep_stars else r"([\\`|<>\[\]*])"
    return re.sub(special, r"\\\1", " ".join(text.split()))
