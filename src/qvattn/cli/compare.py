"""`qvattn compare`: train a grid of variants and seeds, and write the table and the page. No logic of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from qvattn.cli.output import print_json, say, stderr_console, stdout_console

if TYPE_CHECKING:
    from qvattn.lab.compare import Outcome
    from qvattn.train.recipe import Recipe


def compare(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes with qvattn.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, as section.key=value.", metavar="KEY=VALUE")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the comparison. Default: runs/NAME.")] = None,
    variants: Annotated[str | None, typer.Option(help="Only these, by name, with commas between.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.")] = None,
    baseline: Annotated[str | None, typer.Option(help="The variant that differences are taken to.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at once.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each run.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train all runs anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Train every variant of a recipe with every seed, and compare.

    Each run is a process of its own. Complete runs are kept and begun ones resumed, so the same command goes on where
    it stopped. Writes compare.json, compare.md and compare.html; exits with 1 if a run failed.
    """
    from qvattn.lab.compare import choose
    from qvattn.train.recipe import load_recipe, slugify

    chosen = choose(
        load_recipe(recipe, overrides or ()),
        variants=None if variants is None else [name for name in variants.split(",") if name.strip()],
        seeds=seeds,
        baseline=baseline,
        jobs=jobs,
        threads=threads,
    )
    grid = chosen.compare
    assert grid is not None
    seeds_text = ", ".join(map(str, grid.seeds))
    say(f"{len(grid.variants)} variants, seeds {seeds_text}; {grid.jobs} at a time, threads each: {grid.threads}")
    outcome = run_watched(chosen, out or Path("runs") / slugify(chosen.name), overwrite=overwrite)
    present(outcome, as_json=as_json)


def run_watched(recipe: Recipe, out: Path, *, overwrite: bool) -> Outcome:
    """Run the comparison with progress on stderr; Ctrl-C and SIGTERM end with exit code 130."""
    from qvattn.lab.compare import compare as run
    from qvattn.lab.progress import terminable, watching

    try:
        with terminable(), watching(stderr_console()) as watcher:
            return run(recipe, out, watcher=watcher, overwrite=overwrite, command=_command(sys.argv))
    except KeyboardInterrupt:
        say(f"stopped; finished work is kept in {out}, and the same command goes on from there")
        raise typer.Exit(130) from None


def present(outcome: Outcome, *, as_json: bool) -> None:
    """Print the result on stdout, where it lies on stderr, and exit with 1 if a run failed."""
    from qvattn.lab.table import terminal_table

    if as_json:
        print_json(outcome.comparison)
    else:
        console = stdout_console()
        console.print(terminal_table(outcome.comparison, console.width))
        notes = stderr_console()
        for note in outcome.comparison.notes:
            notes.print(Padding(Text(note, style="dim"), (0, 0, 0, 1)))
    for failure in outcome.comparison.failed:
        log = outcome.directory / failure.log
        say(f"failed: {failure.name}, seed {failure.seed}: {failure.reason} (log: {log})")
    say(f"page: {outcome.page}")
    if outcome.failed:
        raise typer.Exit(1)


def _command(argv: Sequence[str]) -> list[str]:
    return ["qvattn", *argv[1:]]
