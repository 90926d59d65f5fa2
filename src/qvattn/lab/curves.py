"""The numbers behind the pictures: mean learning curves with bands, and which rows no other row beats.

Computes only; how it looks is the page's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qvattn.lab.runs import RunRecord


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric over steps: mean, lowest and highest over `seeds` runs, at steps that all of them have."""

    name: str
    seeds: int
    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def learning_curve(name: str, runs: Iterable[RunRecord], metric: str) -> Curve | None:
    """The curve of one variant; finished runs only, unless none is. None if no run has the metric.

    Steps that a seed lacks are left out: a mean over changing seeds would jump where a seed joins or leaves.
    """
    return _over_seeds(name, list(_by_seed(runs, metric).values()))


def difference_curve(name: str, runs: Iterable[RunRecord], baseline: Iterable[RunRecord], metric: str) -> Curve | None:
    """The curve of `metric` minus the baseline's at the same seed and step; None where nothing is shared."""
    own, base = _by_seed(runs, metric), _by_seed(baseline, metric)
    paired = [
        {step: value - base[seed][step] for step, value in points.items() if step in base[seed]}
        for seed, points in own.items()
        if seed in base
    ]
    return _over_seeds(name, [points for points in paired if points])


def _by_seed(runs: Iterable[RunRecord], metric: str) -> dict[int, dict[int, float]]:
    """seed -> step -> value."""
    group = list(runs)
    group = [run for run in group if run.complete] or group
    series = {
        run.seed: {point.step: value for point in run.history if (value := point.get(metric)) is not None}
        for run in group
    }
    return {seed: points for seed, points in series.items() if points}


def _over_seeds(name: str, series: list[dict[int, float]]) -> Curve | None:
    if not series:
        return None
    steps = sorted(set.intersection(*(set(points) for points in series)))
    columns = [[points[step] for points in series] for step in steps]
    return Curve(
        name=name,
        seeds=len(series),
        steps=tuple(steps),
        mean=tuple(sum(column) / len(column) for column in columns),
        low=tuple(min(column) for column in columns),
        high=tuple(max(column) for column in columns),
    )


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of (cost, gain) pairs that no other pair beats: less or equal cost and more or equal gain; by cost."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    front: list[int] = []
    for index in order:
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front
