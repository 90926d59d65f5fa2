"""Self-contained pages of analyses: a frame, sortable tables, and sections that bring their data and their script.

A page works offline: styles, scripts and plotly.js are in it, and its content policy forbids any request. Everything
that comes from data is escaped here or set as text by the scripts, never trusted as markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from .statistics import Estimate

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True, kw_only=True)
class Section:
    """Part of a page.

    kind: names the script `assets/KIND.js`; "" for none.
    html: trusted markup, everything from data in it escaped.  data: what the script reads, in JSON's types.
    """

    kind: str = ""
    html: str
    data: Any = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A table's cell: its text, what it is sorted by, and its class."""

    text: str
    key: float | str | None = None
    kind: str = ""


def build(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page as HTML text. Title and lead are escaped here."""
    from plotly.offline import get_plotlyjs

    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{styles(sections)}</style></head><body><main>",
            f"<header><p class=brand>qvattn</p><h1>{escape(title)}</h1><p class=lead>{escape(lead)}</p></header>",
            *(wrapped(index, section) for index, section in enumerate(sections)),
            "</main>",
            f"<script>{get_plotlyjs()}</script>",
            *scripts(sections),
            "</body></html>\n",
        ]
    )


def styles(sections: Sequence[Section]) -> str:
    """What every page has, and what sections of analyses add."""
    return asset("report.css") + (asset("analyses.css") if sections else "")


def wrapped(index: int, section: Section) -> str:
    """The section's markup with the mark by which its script finds its data."""
    return f'<section data-analysis="{section.kind}" data-json="analysis-{index}">{section.html}</section>'


def scripts(sections: Sequence[Section]) -> list[str]:
    """Script elements: the data of every section, and once each script that any of them needs."""
    data = [
        f'<script type="application/json" id="analysis-{index}">{script_json(section.data)}</script>'
        for index, section in enumerate(sections)
        if section.kind
    ]
    kinds = dict.fromkeys(section.kind for section in sections if section.kind)
    return [
        *data,
        f"<script>{asset('analyses.js')}</script>",
        *(f"<script>{asset(f'{k}.js')}</script>" for k in kinds),
    ]


def table(label: str, titles: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A sortable table whose first cell of each row is its head."""
    head = "".join(f"<th scope=col><button type=button>{escape(title)}</button></th>" for title in titles)
    body = "".join(_row(row) for row in rows)
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{escape(label)}"><table class="summary sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(cells: Sequence[Cell]) -> str:
    parts = []
    for index, cell in enumerate(cells):
        tag, scope = ("th", " scope=row") if index == 0 else ("td", "")
        kind = f" class={cell.kind}" if cell.kind else ""
        key = "" if cell.key is None else escape(str(cell.key))
        parts.append(f'<{tag}{scope}{kind} data-key="{key}">{cell.text}</{tag}>')
    return f"<tr>{''.join(parts)}</tr>"


def words(text: str) -> Cell:
    """A cell of text, which may be folded."""
    return Cell(text=escape(text), key=text, kind="text")


def number(value: Estimate | float | None, *, digits: int = 2, scale: float = 1.0, signed: bool = False) -> Cell:
    """A cell of a number or an estimate with its interval; a dash where there is none."""
    if value is None:
        return Cell(text="–")
    mean, half = (value.mean, value.half_width) if isinstance(value, Estimate) else (value, None)
    bar = "" if half is None else f" <small>± {scale * half:.{digits}f}</small>"
    return Cell(text=f"{scale * mean:{'+' if signed else ''}.{digits}f}{bar}", key=mean)


def notes(lines: Iterable[str]) -> str:
    """Remarks below a table."""
    return "<ul class=notes>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def select(name: str, label: str, options: Sequence[str]) -> str:
    """A labelled choice whose values are 0, 1, ..."""
    items = "".join(f'<option value="{i}">{escape(text)}</option>' for i, text in enumerate(options))
    return f"<label>{escape(label)} <select data-choice={name}>{items}</select></label>"


def switch(name: str, label: str, options: Sequence[str]) -> str:
    """A row of buttons of which one is pressed, the first to begin with."""
    items = "".join(
        f'<button type=button data-value="{escape(text)}" aria-pressed="{str(i == 0).lower()}">{escape(text)}</button>'
        for i, text in enumerate(options)
    )
    return f'<div class=switch role=group aria-label="{escape(label)}" data-switch={name}>{items}</div>'


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return resources.files("qvattn.lab").joinpath("assets", name).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in; NaN and infinity become null."""
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value
