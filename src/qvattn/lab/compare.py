"""Compare variants: train a grid of variants and seeds as independent processes, then write the table and the page.

A comparison lives in one directory and goes on where it stopped: complete runs are kept, begun ones resumed.
Must never mix runs of different recipes in one directory, and never train in this process.

    DIR/compare.yaml        the effective recipe, with the grid as it was chosen
    DIR/plans/<slug>.yaml   the recipe of each run, as it is given to `qvattn train`
    DIR/runs/<slug>/        its run directory          DIR/logs/<slug>.log   what it printed
    DIR/compare.json, compare.md, compare.html         the result
    DIR/cluster.json, cluster/                         where the runs are jobs of a cluster, see `qvattn.lab.cluster`
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qvattn.errors import UserError
from qvattn.files import write_atomically
from qvattn.lab.cluster import Cluster, Jobs, is_submitted, read_jobs, statuses_of, submit
from qvattn.lab.experiment import JSON_NAME, RECIPE_NAME, Experiment
from qvattn.lab.grid import GridRun, RunState, RunStatus, Watcher, exclusive, run_grid
from qvattn.lab.provenance import shared_environment
from qvattn.lab.report import write_report
from qvattn.lab.runs import RunRecord, read_run
from qvattn.lab.summary import Comparison, FailedRun, summarise
from qvattn.lab.table import MARKDOWN_NAME, markdown
from qvattn.train.recipe import (
    CompareSpec,
    Recipe,
    RunPlan,
    changed_keys,
    dump_recipe,
    expand,
    load_recipe,
    slugify,
)

PAGE_NAME = "compare.html"
_PLANS, _RUNS, _LOGS = "plans", "runs", "logs"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a comparison gave: the table, where it is, and how each run ended."""

    comparison: Comparison
    directory: Path
    statuses: tuple[RunStatus, ...]

    @property
    def page(self) -> Path:
        return self.directory / PAGE_NAME

    @property
    def failed(self) -> bool:
        return bool(self.comparison.failed)


def choose(
    recipe: Recipe,
    *,
    variants: Sequence[str] | None = None,
    seeds: int | None = None,
    baseline: str | None = None,
    jobs: int | None = None,
    threads: int | None = None,
) -> Recipe:
    """The recipe with its `compare` section narrowed or widened by what the command line asks for.

    Args:
        variants: names (or slugs) to keep, in the recipe's order.
        seeds: how many; the recipe's own come first, further ones are the smallest numbers not among them.

    Raises:
        UserError: no compare section, an unknown variant, a baseline that is not among the chosen variants.
    """
    spec = recipe.compare
    if spec is None:
        raise UserError(f"recipe {recipe.name!r} has no `compare` section, so there is nothing to compare")
    kept = [v for v in spec.variants if variants is None or _matches(v.name, variants)]
    names = [v.name for v in spec.variants]
    for wanted in variants or ():
        if not any(_matches(name, [wanted]) for name in names):
            raise UserError(f"variant {wanted!r} is not in recipe {recipe.name!r}; allowed: {', '.join(names)}")
    base = baseline or spec.baseline
    found = next((v.name for v in kept if _matches(v.name, [base])), None)
    if found is None:
        listed = ", ".join(v.name for v in kept)
        raise UserError(
            f"the baseline {base!r} is not among the variants to compare ({listed}); add it or pass --baseline"
        )
    for field, value in (("seeds", seeds), ("jobs", jobs), ("threads", threads)):
        if value is not None and value < 1:
            raise UserError(f"{field} must be at least 1, not {value}")
    jobs = jobs or spec.jobs
    chosen = CompareSpec(
        variants=tuple(kept),
        baseline=found,
        seeds=_seeds(spec.seeds, seeds),
        jobs=jobs,
        threads=threads or spec.threads or max(1, processors() // jobs),
    )
    return recipe.model_copy(update={"compare": chosen})


def compare(
    recipe: Recipe,
    out: Path,
    *,
    watcher: Watcher,
    overwrite: bool = False,
    command: Sequence[str] = (),
    launcher: Sequence[str] = (),
    poll_seconds: float = 0.5,
) -> Outcome:
    """Train what is not trained yet and write the result; `recipe` comes from `choose`.

    Args:
        out: the comparison's directory; made if missing, gone on with if it is one already.
        overwrite: train all runs anew.
        command: the command line to name in the result.
        launcher: starts each run, such as `torchrun --standalone --nproc_per_node 4`.

    Raises:
        UserError: `out` holds something else, or runs of another recipe, or is in use.
        KeyboardInterrupt: passed on after the children have ended; the result so far is not written.
    """
    spec = recipe.compare
    if spec is None or spec.threads is None:
        raise ValueError("compare() takes a recipe that went through choose()")
    _check_directory(out)
    with exclusive(out):
        _refuse_living_jobs(recipe, out)
        runs = _write_plans(recipe, out, overwrite=overwrite, launcher=launcher)
        statuses = run_grid(runs, jobs=spec.jobs, threads=spec.threads, watcher=watcher, poll_seconds=poll_seconds)
        comparison, records = collect(recipe, statuses, out=out, command=command)
        write_result(comparison, records, out)
    return Outcome(comparison=comparison, directory=out, statuses=tuple(statuses))


def submit_runs(
    recipe: Recipe,
    out: Path,
    *,
    cluster: Cluster,
    options: Mapping[str, Any],
    launcher: Sequence[str] = (),
    overwrite: bool = False,
    only_failed: bool = False,
) -> list[RunStatus]:
    """Submit every run that is not complete and has no job that waits or runs; returns how all runs are then.

    Args:
        options: submitit's parameters; a run gets `cpus_per_task` threads where that is given.
        overwrite: train all runs anew. only_failed: leave out runs that were never submitted.

    Raises:
        UserError: as `compare`; submitit is missing; the cluster refuses; with `overwrite`, a job that still runs.
    """
    spec = recipe.compare
    if spec is None or spec.threads is None:
        raise ValueError("submit_runs() takes a recipe that went through choose()")
    _check_directory(out)
    with exclusive(out):
        if overwrite:
            _refuse_living_jobs(recipe, out)
        runs = _write_plans(recipe, out, overwrite=overwrite, launcher=launcher)
        before = read_jobs(out)
        jobs = Jobs(
            cluster=cluster, options=dict(options), launcher=tuple(launcher), jobs=before.jobs if before else {}
        )
        due = [
            status.run
            for status in statuses_of(runs, before, out)
            if status.state is RunState.FAILED
            or (status.state is RunState.WAITING and not only_failed and not is_submitted(status, jobs))
        ]
        jobs = submit(due, jobs, out, threads=spec.threads, name=f"qvattn-{slugify(recipe.name)}")
        return statuses_of(runs, jobs, out)


def gather(out: Path, *, command: Sequence[str]) -> Outcome:
    """Write the result of what is finished of the comparison in `out`; nothing is started.

    Raises:
        UserError: `out` holds no comparison, or one that is being trained or submitted just now.
    """
    recipe = submitted_recipe(out)
    with exclusive(out):
        runs = [_planned(plan, out) for plan in expand(recipe)]
        statuses = statuses_of(runs, read_jobs(out), out)
        comparison, records = collect(recipe, statuses, out=out, command=command)
        write_result(comparison, records, out)
    return Outcome(comparison=comparison, directory=out, statuses=tuple(statuses))


def submitted_recipe(out: Path) -> Recipe:
    """The effective recipe of the comparison in `out`. Raises `UserError` where there is none."""
    if not (out / RECIPE_NAME).is_file():
        raise UserError(f"{out} holds no comparison ({RECIPE_NAME} is missing)")
    recipe = load_recipe(out / RECIPE_NAME)
    if recipe.compare is None:
        raise UserError(f"{out / RECIPE_NAME} has no `compare` section")
    return recipe


def _write_plans(recipe: Recipe, out: Path, *, overwrite: bool, launcher: Sequence[str]) -> list[GridRun]:
    plans = expand(recipe)
    for plan in plans:
        if overwrite:
            _clear(out / _RUNS / plan.slug)
        else:
            _check_same(out / _PLANS / f"{plan.slug}.yaml", plan)
    _write(out / RECIPE_NAME, dump_recipe(recipe))
    return [_prepare(plan, out, launcher) for plan in plans]


def _refuse_living_jobs(recipe: Recipe, out: Path) -> None:
    """Two processes would train one run: those of a cluster hold no lock that is seen from here."""
    jobs = read_jobs(out)
    if jobs is None:
        return
    for status in statuses_of([_planned(plan, out) for plan in expand(recipe)], jobs, out):
        if is_submitted(status, jobs):
            job = jobs.jobs[status.run.slug].id
            raise UserError(f"{out}: job {job} ({status.run.label}) still waits or runs; cancel it first, or collect")


def collect(
    recipe: Recipe, statuses: Sequence[RunStatus], *, out: Path, command: Sequence[str]
) -> tuple[Comparison, list[RunRecord]]:
    """Read every run and summarise."""
    spec = recipe.compare
    assert spec is not None
    records = [read_run(s.run.directory, name=s.run.name, seed=s.run.seed) for s in statuses]
    failed = [
        FailedRun(
            name=s.run.name,
            seed=s.run.seed,
            directory=_relative(s.run.directory, out),
            log=_relative(s.run.log, out),
            reason=s.reason,
        )
        for s in statuses
        if s.state is RunState.FAILED
    ]
    provenance: dict[str, Any] = {"command": shlex.join(command)} if command else {}
    provenance["threads per run"] = spec.threads
    provenance["runs side by side"] = spec.jobs
    provenance.update(shared_environment(records))
    comparison = summarise(
        records,
        title=f"Comparison: {recipe.name}",
        baseline=spec.baseline,
        names=[variant.name for variant in spec.variants],
        failed=failed,
        side_by_side=spec.jobs,
        provenance=provenance,
    )
    return comparison, records


def write_result(comparison: Comparison, records: Sequence[RunRecord], out: Path) -> None:
    """Write compare.json, compare.md and compare.html into `out`."""
    content = comparison.model_dump(mode="json")
    _write(out / JSON_NAME, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    _write(out / MARKDOWN_NAME, markdown(comparison))
    experiment = Experiment(comparison=comparison, runs=tuple(records))
    write_report([experiment], out / PAGE_NAME, title=comparison.title)


def processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def train_command(plan_file: Path, directory: Path) -> tuple[str, ...]:
    """The command that does one run; a run directory that holds something already is resumed."""
    command = [sys.executable, "-m", "qvattn.cli", "train", str(plan_file), "--run-dir", str(directory)]
    if directory.is_dir() and any(directory.iterdir()):
        command.append("--resume")
    return tuple(command)


def _prepare(plan: RunPlan, out: Path, launcher: Sequence[str]) -> GridRun:
    _write(out / _PLANS / f"{plan.slug}.yaml", dump_recipe(plan.recipe))
    return _planned(plan, out, launcher)


def _planned(plan: RunPlan, out: Path, launcher: Sequence[str] = ()) -> GridRun:
    directory = out / _RUNS / plan.slug
    command = train_command(out / _PLANS / f"{plan.slug}.yaml", directory)
    return GridRun(
        name=plan.name,
        slug=plan.slug,
        seed=plan.seed,
        directory=directory,
        log=out / _LOGS / f"{plan.slug}.log",
        command=(*launcher, *command[1:]) if launcher else command,
        total_steps=plan.recipe.train.steps,
    )


def _clear(run_directory: Path) -> None:
    """Delete what a run left; anything else that lies there stays."""
    from qvattn.train.run import clear_run

    clear_run(run_directory)


def _check_same(plan_file: Path, plan: RunPlan) -> None:
    """Refuse to go on with a run that was begun with another recipe."""
    if not plan_file.is_file():
        return
    before = load_recipe(plan_file)
    if changed := changed_keys(before, plan.recipe):
        raise UserError(
            f"{plan_file.parent.parent} holds a comparison of another recipe: {plan.name}, seed {plan.seed} differs in "
            f"{', '.join(changed)}; choose another --out, or pass --overwrite to train all runs anew"
        )


def _check_directory(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a directory")
    if out.is_dir():
        strangers = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
        if strangers and not (out / RECIPE_NAME).is_file():
            raise UserError(f"--out {out} holds {strangers[0]!r} and no comparison; choose an empty or new directory")


def _seeds(own: Sequence[int], count: int | None) -> tuple[int, ...]:
    if count is None:
        return tuple(own)
    further = (seed for seed in range(1, count + len(own) + 1) if seed not in own)
    seeds = list(own[:count])
    while len(seeds) < count:
        seeds.append(next(further))
    return tuple(seeds)


def _matches(name: str, wanted: Sequence[str]) -> bool:
    return any(name == item.strip() or slugify(name) == slugify(item) for item in wanted)


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root))


def _write(path: Path, text: str) -> None:
    """Write atomically: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
