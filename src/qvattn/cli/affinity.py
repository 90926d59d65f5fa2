"""`qvattn affinity`: what each head attends to, held against a known grammar. No logic of its own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qvattn.cli.output import check_page, hand_over, say, stdout_console

if TYPE_CHECKING:
    from rich.table import Table

    from qvattn.lab.affinity import Line
    from qvattn.lab.affinity_text import Tagger
    from qvattn.lab.statistics import Estimate


class Which(StrEnum):
    """Which of a run's models."""

    best = "best"
    last = "last"


def affinity(
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories, or directories that hold some.", metavar="RUN...")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("affinity.html"),
    sentences: Annotated[int, typer.Option(min=1, help="Validation sentences, at most.")] = 500,
    tags: Annotated[
        str | None,
        typer.Option(help="For runs on natural text: languages of source and target, such as en,de (needs HanTa)."),
    ] = None,
    checkpoint: Annotated[Which, typer.Option(help="Which model of a run.")] = Which.best,
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON on stdout.")] = False,
) -> None:
    """Measure what heads attend to, in runs on the controlled language (recipe `controlled`).

    Per head: attention between word classes, how well it finds the word that a modifier belongs to, the modifiers of a
    word and the partner of a translation, and whether words that go together attract each other. On natural text, with
    --tags, attention between word classes alone. Writes a page with heat maps, and all numbers beside it as JSON.
    """
    from qvattn.lab.affinity import measure, summary
    from qvattn.lab.affinity_page import write_page
    from qvattn.lab.affinity_text import measure as measure_text
    from qvattn.lab.runs import find_runs

    check_page(output, "affinity.html")
    taggers = None if tags is None else _taggers(tags)
    runs = []
    for path in dict.fromkeys(run for root in directories for run in find_runs(root)):
        if taggers is None:
            runs.append(measure(path, sentences=sentences, checkpoint=checkpoint.value))
        else:
            runs.append(measure_text(path, taggers, sentences=sentences, checkpoint=checkpoint.value))
        say(f"{path}: {runs[-1]['sentences']} sentences")
    write_page(runs, output, title="Affinity")
    hand_over({"runs": runs}, output, as_json=as_json, show=lambda: stdout_console().print(_table(summary(runs))))


def _taggers(tags: str) -> tuple[Tagger, Tagger]:
    from qvattn.errors import UserError
    from qvattn.lab.affinity_text import tagger

    languages = [part.strip() for part in tags.split(",")]
    if len(languages) != 2:
        raise UserError(f"--tags {tags!r}: give two languages, of source and target, such as en,de")
    return tagger(languages[0]), tagger(languages[1])


def _table(lines: list[Line]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in ("variant", "place", "looks for"):
        table.add_column(column)
    for column in ("best head finds it %", "its mass %", "mean mass %", "chance %", "fit effect"):
        table.add_column(column, justify="right")
    for line in lines:
        numbers = (line.best_accuracy, line.best_mass, line.mean_mass)
        table.add_row(
            escape(line.name),
            line.place,
            line.relation,
            *(_text(number) for number in numbers),
            f"{100 * line.chance:.1f}",
            _text(line.fit_effect),
        )
    return table


def _text(value: Estimate | None) -> str:
    if value is None:
        return "–"
    bar = "" if value.half_width is None else f" ± {100 * value.half_width:.1f}"
    return f"{100 * value.mean:.1f}{bar}"
