"""Read run directories: results, learning curve, recipe and environment of each, finished or not.

Only reads. Must never import torch, and never trust what a file holds: a run may be half written.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qvattn.errors import UserError
from qvattn.untrusted import parse_json, parse_yaml

RESULTS, HISTORY, RECIPE, ENVIRONMENT = "results.json", "history.csv", "recipe.yaml", "environment.json"
_MARKS = (RESULTS, HISTORY, RECIPE)
_INNER = {"checkpoints", "tensorboard"}


@dataclass(frozen=True, kw_only=True)
class HistoryPoint:
    """One line of history.csv; fields that the line leaves empty are None."""

    step: int
    values: dict[str, float]

    def get(self, name: str) -> float | None:
        return self.values.get(name)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run directory tells about its run."""

    directory: Path
    name: str
    seed: int
    results: dict[str, Any] = field(default_factory=dict)
    history: tuple[HistoryPoint, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.results.get("status") == "complete"

    def number(self, *path: str) -> float | None:
        """The number at `path` in the results, or None where there is none."""
        value: Any = self.results
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_run(directory: Path) -> bool:
    """Whether `directory` looks like a run directory."""
    return any((directory / mark).is_file() for mark in _MARKS)


def is_complete(directory: Path) -> bool:
    """Whether the run in `directory` finished; False where there is none."""
    return read_json(directory / RESULTS, strict=False).get("status") == "complete"


def find_runs(root: Path) -> list[Path]:
    """All run directories at or below `root`, sorted; what lies inside a run directory is not searched.

    Raises:
        UserError: `root` is not a directory or holds no run.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a directory; give a run directory or one that holds run directories")
    runs = list(_walk(root))
    if not runs:
        raise UserError(f"{root} holds no run (a directory with {', '.join(_MARKS)})")
    return runs


def _walk(directory: Path) -> Iterator[Path]:
    if is_run(directory):
        yield directory
        return
    for child in sorted(directory.iterdir()):
        if child.is_dir() and not child.is_symlink() and child.name not in _INNER:
            yield from _walk(child)


def read_run(directory: Path, *, name: str | None = None, seed: int | None = None) -> RunRecord:
    """Read one run directory.

    Args:
        directory: the run directory.
        name, seed: what the run is called where the caller knows better than the files.

    Raises:
        UserError: results.json, environment.json or recipe.yaml is not readable as what it should be.
    """
    results = read_json(directory / RESULTS)
    environment = read_json(directory / ENVIRONMENT)
    recipe = read_yaml(directory / RECIPE)
    if name is None:
        name = str(results.get("name") or recipe.get("name") or directory.name)
    if seed is None:
        found = (results.get("seed"), environment.get("seed"), _find_seed(recipe))
        seed = next((value for value in found if isinstance(value, int)), 0)
    return RunRecord(
        directory=directory,
        name=name,
        seed=seed,
        results=results,
        history=tuple(read_history(directory / HISTORY)),
        recipe=recipe,
        environment=environment,
    )


def read_history(path: Path) -> list[HistoryPoint]:
    """The points of a history.csv in step order; lines cut short by a writer at work are left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    points: dict[int, HistoryPoint] = {}
    for row in _rows(text):
        if None in row or None in row.values():  # more or fewer cells than the header
            continue
        numbers = {key: number for key, cell in row.items() if (number := _number(cell)) is not None}
        step = numbers.pop("step", math.nan)
        if math.isfinite(step):
            step = int(step)
            points[step] = HistoryPoint(step=step, values=numbers)
    return [points[step] for step in sorted(points)]


def _rows(text: str) -> Iterator[dict[str, str]]:
    """Rows up to the first that is no CSV at all."""
    try:
        yield from csv.DictReader(text.splitlines())
    except csv.Error:
        return


def last_value(history: Iterable[HistoryPoint], name: str) -> float | None:
    """The last value of `name` in the history, None if it never occurs."""
    found = None
    for point in history:
        value = point.get(name)
        found = value if value is not None else found
    return found


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys; lists and scalars are leaves."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _find_seed(recipe: dict[str, Any]) -> Any:
    train = recipe.get("train")
    return train.get("seed") if isinstance(train, dict) else None


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def read_json(path: Path, *, strict: bool = True) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, or broken and not `strict`."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        if not strict:
            return {}
        raise UserError(f"{path} is not valid JSON: {error}; train this run again, or leave it out") from error
    return value if isinstance(value, dict) else {}


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty if the file is missing."""
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    return value if isinstance(value, dict) else {}
