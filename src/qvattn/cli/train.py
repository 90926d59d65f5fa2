"""`qvattn train`: train one model from a recipe. No logic of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import print_json, say

if TYPE_CHECKING:
    from ..train.recipe import Recipe

INTERRUPTED = 130


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes with qvattn.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, as section.key=value.", metavar="[KEY=VALUE]...")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run goes: new or empty, unless resumed. Default: runs/NAME.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in the directory.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print parameters, memory and batches an epoch; train nothing.")
    ] = False,
    processes: Annotated[int, typer.Option(help="With --dry-run: memory on each of so many processes.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
    seed: Annotated[int | None, typer.Option(help="The same as train.seed=N.", min=0)] = None,
    variant: Annotated[str | None, typer.Option(help="The row of this name in the recipe's comparison.")] = None,
) -> None:
    """Train one model from a recipe.

    The command line beats the recipe, which beats the defaults. Ctrl-C or SIGTERM saves a checkpoint first and exits
    with 130; the same command with --resume goes on to the very numbers an uninterrupted run gives.

    Under torchrun or accelerate launch several processes train it together; train.parallel=fsdp2 divides the model over
    them. docs/scale.md has the commands.
    """
    from ..train.recipe import load_recipe, pick_variant
    from ..train.signals import follow_parent

    follow_parent()
    chosen = load_recipe(recipe, overrides or ())
    if variant is not None:
        chosen = pick_variant(chosen, variant)
    if dry_run:
        _describe(chosen, processes, as_json=as_json)
        return
    from ..train.recipe import slugify
    from ..train.run import run_training

    directory = run_dir or Path("runs") / slugify(chosen.name)
    results = run_training(chosen, directory, resume=resume, overwrite=overwrite, seed=seed)
    if os.environ.get("RANK", "0") != "0":
        pass  # one of several processes speaks for all
    elif as_json:
        print_json(results)
    else:
        say(_summary(results, directory))
    if results["status"] != "complete":
        raise typer.Exit(INTERRUPTED)


def _describe(recipe: Recipe, processes: int, *, as_json: bool) -> None:
    from ..train.dry_run import describe, readable

    facts = describe(recipe, processes)
    if as_json:
        print_json(facts)
    else:
        print(readable(facts))


def _summary(results: dict[str, Any], directory: Path) -> str:
    lines = [f"{results['name']}: {results['status']} after {results['steps']} steps, in {directory}"]
    for label in ("best", "test"):
        scores = results[label]
        if scores:
            lines.append(
                f"{label} (step {scores['step']}): accuracy {100 * scores['accuracy']:.2f}%, "
                f"loss {scores['loss']:.4f}, perplexity {scores['perplexity']:.2f}"
            )
    return "\n".join(lines)
