"""`qvattn demo`: the main job on the embedded text, told step by step. No logic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qvattn.cli.output import say

RECIPE = "demo"


def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, as section.key=value.", metavar="KEY=VALUE")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the comparison.")] = Path("runs/demo"),
    jobs: Annotated[int | None, typer.Option(help="Runs at once.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train all runs anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Train and compare attention variants on the embedded text: minutes on two cores, no download."""
    from qvattn.cli.compare import present, run_watched
    from qvattn.lab.compare import choose
    from qvattn.train.recipe import load_recipe

    chosen = choose(load_recipe(RECIPE, overrides or ()), jobs=jobs)
    grid = chosen.compare
    assert grid is not None
    say(
        "Small translation models learn to turn the King James text into World English, verse by verse.\n"
        f"They differ in one thing only, their attention: {', '.join(v.name for v in grid.variants)}.\n"
        f"Same data order, same initial values wherever two share a parameter, {_seeds(len(grid.seeds))} each; "
        f"{grid.jobs} at a time with {grid.threads} thread{'' if grid.threads == 1 else 's'}.\n"
        f"Stop it whenever you like: the same command goes on from {out}.\n"
    )
    outcome = run_watched(chosen, out, overwrite=overwrite)
    if not as_json:
        say(
            "\nHow to read the table: accuracy is the share of target tokens that the model ranks first, given the\n"
            f"true tokens before them; Δ is the difference to {grid.baseline}; cache is what each generated token\n"
            "costs in memory. So small a run shows the way, not the verdict: `qvattn compare multi30k_small` is\n"
            "the real experiment.\n"
        )
    present(outcome, as_json=as_json)


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"
