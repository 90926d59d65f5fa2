"""Recall: which variants bind keys to values, from runs on the MQAR task.

A run mostly either solves the task or stays at the level of guessing, so a mean over seeds with an interval hides what
happened: every seed is shown, and how many solved it. Accuracy by gap tells a model that matches by content from one
that only knows where to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..data import BatchPlan
from ..data.synthetic.mqar import MqarDataset, MqarSpec, make_mqar
from ..errors import UserError
from ..models import CausalLM
from ..train.checkpoint import find_checkpoint
from ..train.recipe import Recipe, read_recipe
from .check.loading import find_run, load
from .experiment import RECIPE_NAME
from .runs import RunRecord, find_runs, read_run, read_yaml
from .statistics import Estimate, estimate

SOLVED = 0.99
"""Recall accuracy from which a run counts as having solved the task."""

BATCH_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True)
class RecallRow:
    """One variant. accuracy, of the last validation, and the first step at which the task was solved, by seed."""

    name: str
    cache_elements: int | None
    chance: float
    accuracy: dict[int, float]
    solved_at: dict[int, int]
    mean: Estimate

    @property
    def solved(self) -> int:
        """Seeds whose last validation counts as solved."""
        return sum(value >= SOLVED for value in self.accuracy.values())

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {**asdict(self), "mean": self.mean.model_dump(), "solved": self.solved}


def recall_rows(directories: Sequence[Path]) -> list[RecallRow]:
    """A row per variant over the finished MQAR runs in these directories, in the order of their comparison.

    Raises UserError if none of the runs is a finished one on MQAR.
    """
    paths = dict.fromkeys(path for directory in directories for path in find_runs(directory))
    runs = [run for run in map(read_run, paths) if run.complete and _task(run) is not None]
    if not runs:
        raise UserError(f"{', '.join(map(str, directories))}: no finished run on corpus: mqar (recipe `mqar`)")
    tasks = {str(_task(run)) for run in runs}
    if len(tasks) > 1:
        raise UserError(f"the runs differ in data.mqar or data.block_size, so they cannot be compared: {sorted(tasks)}")
    names = dict.fromkeys(run.name for run in runs)
    planned = [name for directory in directories for name in _planned(directory)]
    ordered = [*(name for name in dict.fromkeys(planned) if name in names), *(n for n in names if n not in planned)]
    return [_row(name, [run for run in runs if run.name == name]) for name in ordered]


def _planned(directory: Path) -> list[str]:
    """The variants of the comparison in a directory, as its recipe lists them; none where it holds no comparison."""
    grid = read_yaml(directory / RECIPE_NAME).get("compare") or {}
    return [str(variant.get("name")) for variant in grid.get("variants", ())]


def _task(run: RunRecord) -> dict[str, Any] | None:
    data = run.recipe.get("data", {})
    if data.get("corpus") != "mqar":
        return None
    return {"mqar": MqarSpec(**(data.get("mqar") or {})).model_dump(), "block_size": data.get("block_size")}


def _row(name: str, runs: Sequence[RunRecord]) -> RecallRow:
    task = _task(runs[0])
    assert task is not None
    accuracy = {run.seed: value for run in runs if (value := run.number("valid", "accuracy")) is not None}
    first = {run.seed: _first_solved(run) for run in runs}
    cache = runs[0].number("cache_elements_per_token", "layer")
    return RecallRow(
        name=name,
        cache_elements=None if cache is None else int(cache),
        chance=1 / task["mqar"]["pairs"],
        accuracy=dict(sorted(accuracy.items())),
        solved_at={seed: step for seed, step in sorted(first.items()) if step is not None},
        mean=estimate(list(accuracy.values())),
    )


def _first_solved(run: RunRecord) -> int | None:
    values = ((point.step, point.get("valid_accuracy")) for point in run.history)
    return next((step for step, value in values if value is not None and value >= SOLVED), None)


def markdown(rows: Sequence[RecallRow]) -> str:
    """The rows as a table: every seed, since outcomes are mostly all or nothing."""
    seeds = sorted({seed for row in rows for seed in row.accuracy})
    head = ["variant", "cache", *(f"seed {seed} %" for seed in seeds), "mean %", "solved", "solved at step"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for row in rows:
        bar = "" if row.mean.half_width is None else f" ± {100 * row.mean.half_width:.1f}"
        cells = [
            row.name,
            "–" if row.cache_elements is None else str(row.cache_elements),
            *(f"{100 * row.accuracy[seed]:.1f}" if seed in row.accuracy else "–" for seed in seeds),
            f"{100 * row.mean.mean:.1f}{bar}",
            f"{row.solved} of {len(row.accuracy)}",
            ", ".join(str(row.solved_at.get(seed, "–")) for seed in row.accuracy),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class GapBin:
    """Recall over questions whose gap to their pair lies in [low, high]."""

    low: int
    high: int
    accuracy: float
    count: int


def accuracy_by_gap(path: Path, *, checkpoint: Literal["best", "last"] = "last") -> list[GapBin]:
    """Recall accuracy on validation rows by the tokens between a pair and its question, in bins that double."""
    run = find_run(path)
    if run is None:
        raise UserError(f"{path} is not a run directory: it needs recipe.yaml and checkpoints")
    recipe = read_recipe((run / "recipe.yaml").read_text(encoding="utf-8"), origin=str(run / "recipe.yaml"))
    if recipe.data.corpus != "mqar":
        raise UserError(f"{path}: data.corpus={recipe.data.corpus!r}: a run on mqar is needed")
    model = load(find_checkpoint(run, checkpoint) if run == path else path)
    assert isinstance(model, CausalLM)
    return _bins(*_hits(model, recipe))


def _hits(model: CausalLM, recipe: Recipe) -> tuple[Any, Any]:
    data: MqarDataset = make_mqar(recipe.data.mqar or MqarSpec(), recipe.data.block_size, "valid")
    model.eval()
    hits = np.zeros(data.answers.shape, dtype=bool)
    for indices in BatchPlan(data.lengths, max_tokens=max(BATCH_TOKENS, data.ids.shape[1]), seed=0).epoch(0):
        with torch.inference_mode():
            best = model(data.collate(indices)["input_ids"]).logits.argmax(-1).numpy()
        hits[indices] = (
            np.take_along_axis(best, data.questions[indices].astype(np.int64), axis=1) == data.answers[indices]
        )
    return hits, data.gaps


def _bins(hits: Any, gaps: Any) -> list[GapBin]:
    found, low = [], 0
    while low <= gaps.max():
        high = max(2 * low - 1, low)
        inside = (gaps >= low) & (gaps <= high)
        if inside.any():
            found.append(GapBin(low=low, high=high, accuracy=float(hits[inside].mean()), count=int(inside.sum())))
        low = high + 1
    return found
