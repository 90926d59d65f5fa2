"""`qvattn report`: one self-contained HTML page from any set of runs. No logic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qvattn.cli.output import print_json, say


def report(
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories, or directories that hold some.", metavar="DIR...")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
    baseline: Annotated[str | None, typer.Option(help="The variant that differences are taken to.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON on stdout.")] = False,
) -> None:
    """Make one HTML page with tables, learning curves, accuracy against cache, and where each run came from.

    The page needs no network. Comparisons get a section each; single runs are put together into one. What `affinity`,
    `diffusion`, `distance`, `extrapolate` or `operators` wrote as JSON under its usual name into one of the directories
    is shown too, and recall where runs are on that task.
    """
    from qvattn.errors import UserError
    from qvattn.lab.analyses import sections
    from qvattn.lab.experiment import load_experiments
    from qvattn.lab.report import write_report

    if output.is_dir():
        raise UserError(f"--output {output} is a directory; give a file, such as {output / 'report.html'}")
    experiments = load_experiments(directories, baseline=baseline)
    heading = title or (experiments[0].comparison.title if len(experiments) == 1 else "Report")
    write_report(experiments, output, title=heading, analyses=sections(directories))
    say(f"page: {output}")
    if as_json:
        print_json([experiment.comparison for experiment in experiments])
