"""`qvattn recall`: which variants solved associative recall, seed by seed. No logic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qvattn.cli.output import print_json, say


def recall(
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories, or directories that hold some.", metavar="DIR...")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write a page with every seed.")] = None,
    gaps: Annotated[bool, typer.Option("--gaps", help="Also recall by the gap between pair and question.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON on stdout.")] = False,
) -> None:
    """Show, seed by seed, which variants solved multi-query associative recall (recipe `mqar`).

    Prints a Markdown table: outcomes are mostly all or nothing, so every seed is shown beside mean and interval.
    """
    from qvattn.lab.recall import accuracy_by_gap, markdown, recall_rows
    from qvattn.lab.runs import find_runs, is_complete

    rows = recall_rows(directories)
    runs = dict.fromkeys(path for root in directories for path in find_runs(root) if is_complete(path))
    by_gap = {path.name: accuracy_by_gap(path) for path in runs} if gaps else {}
    if output is not None:
        from qvattn.lab.recall_page import write_page

        write_page(rows, output, title="Associative recall")
        say(f"page: {output}")
    if as_json:
        bins = {name: [vars(one) for one in found] for name, found in by_gap.items()}
        print_json({"variants": [row.as_dict() for row in rows], "gaps": bins})
        return
    typer.echo(markdown(rows), nl=False)
    for name, found in by_gap.items():
        parts = ", ".join(f"{one.low}-{one.high}: {100 * one.accuracy:.1f}" for one in found)
        typer.echo(f"{name}: recall % by gap: {parts}")
