"""Results as people read them: one table a check, and on request the shapes and reasons of every step."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .result import CheckResult, Details, Measure, Number, short


def report(one: CheckResult, *, explain: bool) -> RenderableType:
    """One check: verdict and claim, its numbers, its details and notes; with `explain` its steps first."""
    verdict = Text("passed", style="green") if one.passed else Text("FAILED", style="bold red")
    parts: list[RenderableType] = [Text.assemble(verdict, " ", (one.name, "bold"), ": ", one.claim)]
    if explain:
        for number, step in enumerate(one.steps, start=1):
            parts.append(
                Text.assemble(f"  {number}. {step.what}: ", (step.shapes, "cyan"), f"\n     because {step.why}")
            )
    parts.append(_measures(one.measures))
    if one.details is not None and one.details.rows:
        parts.append(_details(one.details))
    parts.extend(Text(f"  {note}", style="dim") for note in one.notes if explain)
    return Group(*parts, Text(""))


def summary(results: Sequence[CheckResult]) -> Text:
    """The last line: how many passed, and the names of those that did not."""
    failed = [one.name for one in results if not one.passed]
    passed = f"{len(results) - len(failed)} of {len(results)} checks passed"
    return Text(passed if not failed else f"{passed}; failed: {', '.join(failed)}", style="bold")


def _measures(measures: Sequence[Measure]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=True)
    table.add_column("measured")
    table.add_column("value", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    for measure in measures:
        verdict = "" if measure.bound is None else "[green]ok[/]" if measure.ok else "[bold red]broken[/]"
        table.add_row(escape(measure.name), cell(measure.value), escape(measure.bound or ""), verdict)
    return table


def _details(details: Details) -> Table:
    table = Table(box=SIMPLE_HEAD, title=escape(details.title), title_justify="left", title_style="italic")
    for at, column in enumerate(details.columns):
        text = all(isinstance(row[at], str) for row in details.rows)
        table.add_column(escape(column), justify="left" if text else "right")
    for row in details.rows:
        table.add_row(*(cell(value) for value in row))
    return table


def cell(value: Number | str) -> str:
    """A value in a table; whole numbers that come as floats lose their point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return short(int(value))
    return escape(short(value))
