"""`qvattn compare`: train a grid of variants and seeds, and write the table and the page. No logic of its own."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from qvattn.cli.output import print_json, say, stderr_console, stdout_console

if TYPE_CHECKING:
    from qvattn.lab.compare import Outcome
    from qvattn.lab.grid import RunStatus
    from qvattn.train.recipe import Recipe


def compare(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe file, or the name of one that comes with qvattn.")
    ] = None,
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
    launcher: Annotated[
        str, typer.Option(help="Starts each run, such as 'torchrun --standalone --nproc_per_node 4'.")
    ] = "",
    cluster: Annotated[
        str | None, typer.Option(help="Submit each run as a job and return: slurm, or local (jobs on this machine).")
    ] = None,
    cluster_options: Annotated[
        list[str] | None,
        typer.Option(
            help="Of each job, as submitit names it: timeout_min=600, gpus_per_node=1, slurm_partition=gpu ... "
            "Give it once for each.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    collect: Annotated[
        Path | None, typer.Option(help="Start nothing: write the result of what is finished there.", metavar="DIR")
    ] = None,
    retry_failed: Annotated[
        Path | None, typer.Option(help="Submit the failed runs of this comparison again.", metavar="DIR")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Train every variant of a recipe with every seed, and compare.

    Each run is a process of its own. Complete runs are kept and begun ones resumed, so the same command goes on where
    it stopped. Writes compare.json, compare.md and compare.html; exits with 1 if a run failed.

    With --cluster each run is a job; --collect DIR gathers what is finished and names what failed. The same command, or
    --retry-failed DIR, submits again.
    """
    from qvattn.errors import UserError
    from qvattn.lab.compare import choose
    from qvattn.train.recipe import load_recipe, slugify

    if collect is not None or retry_failed is not None:
        if recipe is not None or (collect is not None and retry_failed is not None):
            raise UserError("--collect DIR and --retry-failed DIR stand alone: the recipe lies in DIR")
        _go_on(collect, retry_failed, as_json=as_json)
        return
    if recipe is None:
        raise UserError("RECIPE is missing: a recipe file, or the name of one that comes with qvattn")
    if cluster is None and cluster_options:
        raise UserError("--cluster-options without --cluster: give --cluster slurm, or leave them out")
    from qvattn.lab.cluster import checked_cluster, merged, parse_options

    options = parse_options(cluster_options or [])
    chosen = choose(
        load_recipe(recipe, overrides or ()),
        variants=None if variants is None else [name for name in variants.split(",") if name.strip()],
        seeds=seeds,
        baseline=baseline,
        jobs=jobs,
        threads=threads or options.get("cpus_per_task"),
    )
    grid = chosen.compare
    assert grid is not None
    directory = out or Path("runs") / slugify(chosen.name)
    seeds_text = ", ".join(map(str, grid.seeds))
    if cluster is not None:
        from qvattn.lab.compare import submit_runs

        place = checked_cluster(cluster)
        statuses = submit_runs(
            chosen,
            directory,
            cluster=place,
            options=merged(options, jobs=jobs, cluster=place),
            launcher=shlex.split(launcher),
            overwrite=overwrite,
        )
        _say_submitted(statuses, directory, as_json=as_json)
        return
    say(f"{len(grid.variants)} variants, seeds {seeds_text}; {grid.jobs} at a time, threads each: {grid.threads}")
    outcome = run_watched(chosen, directory, overwrite=overwrite, launcher=shlex.split(launcher))
    present(outcome, as_json=as_json)


def run_watched(recipe: Recipe, out: Path, *, overwrite: bool, launcher: Sequence[str] = ()) -> Outcome:
    """Run the comparison with progress on stderr; Ctrl-C and SIGTERM end with exit code 130."""
    from qvattn.lab.compare import compare as run
    from qvattn.lab.progress import terminable, watching

    try:
        with terminable(), watching(stderr_console()) as watcher:
            command = _command(sys.argv)
            return run(recipe, out, watcher=watcher, overwrite=overwrite, command=command, launcher=launcher)
    except KeyboardInterrupt:
        say(f"stopped; finished work is kept in {out}, and the same command goes on from there")
        raise typer.Exit(130) from None


def _go_on(collect: Path | None, retry_failed: Path | None, *, as_json: bool) -> None:
    """What needs no recipe: --collect and --retry-failed."""
    from qvattn.errors import UserError
    from qvattn.lab.cluster import read_jobs
    from qvattn.lab.compare import gather, submit_runs, submitted_recipe

    if retry_failed is not None:
        recipe, jobs = submitted_recipe(retry_failed), read_jobs(retry_failed)
        if jobs is None:
            raise UserError(f"{retry_failed} was not submitted to a cluster; run `qvattn compare` again instead")
        statuses = submit_runs(
            recipe,
            retry_failed,
            cluster=jobs.cluster,
            options=jobs.options,
            launcher=jobs.launcher,
            only_failed=True,
        )
        _say_submitted(statuses, retry_failed, as_json=as_json)
        return
    assert collect is not None
    outcome = gather(collect, command=_command(sys.argv))
    say(_counted(outcome.statuses))
    present(outcome, as_json=as_json)


def _say_submitted(statuses: Sequence[RunStatus], out: Path, *, as_json: bool) -> None:
    """The jobs and what became of earlier ones."""
    from qvattn.lab.cluster import read_jobs

    jobs = read_jobs(out)
    known = {slug: job.id for slug, job in jobs.jobs.items()} if jobs is not None else {}
    if as_json:
        print_json(
            [
                {
                    "name": status.run.name,
                    "seed": status.run.seed,
                    "state": status.state.value,
                    "job": known.get(status.run.slug),
                    "log": str(status.run.log),
                }
                for status in statuses
            ]
        )
    for status in statuses:
        job = known.get(status.run.slug)
        say(f"{status.run.label}: {status.state.value}" + (f", job {job}" if job else ""))
    say(f"{_counted(statuses)}. When they are done: qvattn compare --collect {out}")


def _counted(statuses: Sequence[RunStatus]) -> str:
    """`6 runs: 2 complete, 3 running, 1 waiting`."""
    names = {"kept": "complete", "done": "complete"}
    count = Counter(names.get(status.state.value, status.state.value) for status in statuses)
    return f"{len(statuses)} runs: " + ", ".join(f"{number} {state}" for state, number in count.items())


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
