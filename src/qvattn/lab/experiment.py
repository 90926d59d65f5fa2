"""An experiment: runs that may be compared with each other, found in directories that somebody names.

Reads only. Runs of different comparisons are never put into one table: what differs between them is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qvattn.errors import UserError
from qvattn.lab.provenance import shared_environment
from qvattn.lab.runs import RunRecord, find_runs, is_run, read_json, read_run, read_yaml
from qvattn.lab.summary import Comparison, FailedRun, summarise

JSON_NAME, RECIPE_NAME = "compare.json", "compare.yaml"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table and the runs behind it, finished or not."""

    comparison: Comparison
    runs: tuple[RunRecord, ...]


def load_experiments(directories: Sequence[Path], *, baseline: str | None = None) -> list[Experiment]:
    """Every comparison below the directories as one experiment, and all single runs together as a last one.

    Args:
        baseline: the row that differences are taken to, instead of the one a comparison names. Single runs have
            none unless it is given.

    Raises:
        UserError: a directory holds no run, or no experiment has a row called `baseline`.
    """
    if not directories:
        raise UserError("give at least one run directory, or a directory that holds some")
    # keyed by their resolved paths, so that nothing counts twice, and shown by the paths that were given
    comparisons: dict[Path, Path] = {}
    singles: dict[Path, Path] = {}
    for root in directories:
        runs = find_runs(root)
        nested = list(_comparisons(root))
        comparisons.update({directory.resolve(): directory for directory in nested})
        outside = [run for run in runs if not any(run.is_relative_to(directory) for directory in nested)]
        singles.update({run.resolve(): run for run in outside})
    experiments = [_load_comparison(directory, baseline) for directory in comparisons.values()]
    if singles:
        experiments.append(_load_singles(list(singles.values()), baseline))
    _check_baseline(experiments, baseline)
    return experiments


def _comparisons(directory: Path) -> Iterator[Path]:
    if (directory / RECIPE_NAME).is_file():
        yield directory
    elif not is_run(directory):
        for child in sorted(directory.iterdir()):
            if child.is_dir() and not child.is_symlink():
                yield from _comparisons(child)


def _load_comparison(directory: Path, baseline: str | None) -> Experiment:
    recipe = read_yaml(directory / RECIPE_NAME)
    written = read_json(directory / JSON_NAME, strict=False)
    grid = recipe.get("compare") or {}
    names = [str(variant["name"]) for variant in grid.get("variants", ())]
    runs = [read_run(run) for run in find_runs(directory)]
    own = baseline if baseline in names else grid.get("baseline")
    comparison = summarise(
        runs,
        title=str(written.get("title") or f"Comparison: {recipe.get('name', directory.name)}"),
        baseline=own,
        names=names,
        failed=[FailedRun.model_validate(failure) for failure in written.get("failed", ())],
        side_by_side=int(grid.get("jobs") or 1),
        provenance=written.get("provenance") or shared_environment(runs),
    )
    return Experiment(comparison=comparison, runs=tuple(runs))


def _load_singles(directories: Sequence[Path], baseline: str | None) -> Experiment:
    runs = _distinct([read_run(directory) for directory in directories])
    names = {run.name for run in runs}
    title = "Single runs" if len(runs) > 1 else f"Run: {runs[0].name}"
    comparison = summarise(
        runs,
        title=title,
        baseline=baseline if baseline in names else None,
        provenance=shared_environment(runs),
    )
    return Experiment(comparison=comparison, runs=tuple(runs))


def _distinct(runs: list[RunRecord]) -> list[RunRecord]:
    """Runs of one name and seed get their directory's name added, so that none hides another."""
    count = Counter((run.name, run.seed) for run in runs)
    return [
        replace(run, name=f"{run.name} ({run.directory.parent.name}/{run.directory.name})")
        if count[run.name, run.seed] > 1
        else run
        for run in runs
    ]


def _check_baseline(experiments: Sequence[Experiment], baseline: str | None) -> None:
    rows = [row.name for experiment in experiments for row in experiment.comparison.rows]
    if baseline is not None and baseline not in rows:
        raise UserError(f"--baseline {baseline!r} is not a row; allowed: {', '.join(dict.fromkeys(rows))}")


def settings(run: RunRecord) -> dict[str, Any]:
    """A run's recipe without what names it: its name and its seed."""
    recipe = {key: value for key, value in run.recipe.items() if key not in ("name", "compare")}
    train = recipe.get("train")
    if isinstance(train, dict):
        recipe["train"] = {key: value for key, value in train.items() if key != "seed"}
    return recipe
