"""`qvattn distance`: attention against distance, power law or exponential. No logic of its own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qvattn.cli.output import check_page, hand_over, say, stdout_console

if TYPE_CHECKING:
    from rich.table import Table


class Which(StrEnum):
    """Which of a run's models."""

    best = "best"
    last = "last"


def distance(
    subjects: Annotated[
        list[str],
        typer.Argument(
            help="Run directories, directories that hold some, saved models, or Hugging Face language models.",
            metavar="RUN_OR_MODEL...",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("distance.html"),
    source: Annotated[Path | None, typer.Option(help="Source sentences for a translation model.")] = None,
    target: Annotated[Path | None, typer.Option(help="Their translations, aligned line by line.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text for a language model.")] = None,
    sentences: Annotated[int, typer.Option(min=2, help="Sentences, or blocks of text.")] = 100,
    length: Annotated[int, typer.Option(min=8, help="Tokens of one, at most (a run's own block at most).")] = 256,
    checkpoint: Annotated[Which, typer.Option(help="Which model of a run.")] = Which.best,
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON on stdout.")] = False,
) -> None:
    """Measure how far the heads of trained models look, and whether attention falls as a power law or exponentially.

    Per layer and head, over real sentences: mean weight, score and cosine of query and key at every distance, and both
    decays fitted by maximum likelihood and compared by their likelihoods, with an interval over sentences. For heads
    with AGF also the exponents they learned. Without files, a run's validation data is used, and for foreign models
    the embedded King James text. Writes a page with a log-log plot for every head, and all numbers beside it as JSON.
    """
    from qvattn.lab.distance_page import write_page
    from qvattn.lab.distance_subjects import measure_all

    check_page(output, "distance.html")
    runs = []
    for run in measure_all(
        subjects,
        source=source,
        target=target,
        text=text,
        sentences=sentences,
        length=length,
        checkpoint=checkpoint.value,
    ):
        runs.append(run)
        say(f"{run['run']}: {run['sentences']} sentences")
    write_page(runs, output, title="Attention against distance")
    hand_over({"runs": runs}, output, as_json=as_json, show=lambda: stdout_console().print(_table(runs)))


def _table(runs: list[dict[str, Any]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from qvattn.lab.distance import summary
    from qvattn.lab.distance_page import TITLES, cells

    table = Table(box=SIMPLE_HEAD)
    for i, title in enumerate(TITLES):
        table.add_column(title, justify="left" if i < 3 else "right")
    for run in runs:
        for line in summary(run):
            table.add_row(escape(run["name"]), *cells(line))
    return table
