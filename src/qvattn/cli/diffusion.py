"""`qvattn diffusion`: what heads match and how well the right partner stands out. No logic of its own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qvattn.cli.output import check_page, hand_over, say, stdout_console

if TYPE_CHECKING:
    from rich.table import Table

    from qvattn.lab.diffusion_summary import Verdict


class Which(StrEnum):
    """Which of a run's models."""

    best = "best"
    last = "last"


def diffusion(
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories, or directories that hold some.", metavar="RUN...")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("diffusion.html"),
    sentences: Annotated[int, typer.Option(min=1, help="Validation sentences, at most.")] = 500,
    checkpoint: Annotated[Which, typer.Option(help="Which model of a run.")] = Which.best,
    baseline: Annotated[str | None, typer.Option(help="The variant that differences are taken to.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON on stdout.")] = False,
) -> None:
    """Measure the diffusion of deep matching, in runs on the controlled language (recipe `controlled`).

    Per head: over which feature groups of their partners queries and keys spread, and how well the right partner's
    score stands out before and after the softmax. Says which predictions of the published explanation of why QKV does
    better than QV came true. Writes a page with heat maps, and all numbers beside it as JSON.
    """
    from qvattn.lab.diffusion import measure
    from qvattn.lab.diffusion_page import write_page
    from qvattn.lab.diffusion_summary import choose_baseline, predictions, results
    from qvattn.lab.runs import find_runs

    check_page(output, "diffusion.html")
    runs = []
    for path in dict.fromkeys(run for root in directories for run in find_runs(root)):
        runs.append(measure(path, sentences=sentences, checkpoint=checkpoint.value))
        say(f"{path}: {runs[-1]['sentences']} sentences")
    base = choose_baseline(runs, baseline)
    write_page(runs, output, title="Diffusion of deep matching", baseline=base)
    found = results(runs, base)
    hand_over(found, output, as_json=as_json, show=lambda: stdout_console().print(_table(predictions(runs, base))))


def _table(verdicts: list[Verdict]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in ("variant", "predicted", "measure"):
        table.add_column(column)
    table.add_column("found", justify="right")
    table.add_column("came so")
    for one in verdicts:
        bar = "" if one.found is None or one.found.half_width is None else f" ± {one.found.half_width:.3f}"
        found = "–" if one.found is None else f"{one.found.mean:+.3f}{bar}"
        table.add_row(escape(one.name), escape(one.prediction), one.measure, found, one.verdict)
    return table
