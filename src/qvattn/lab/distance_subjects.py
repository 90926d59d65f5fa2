"""What `qvattn distance` can look at: runs and saved models of ours, one after the other.

Only finds and loads; what is measured is in `distance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from .check.loading import Texts, find_run, load_subject
from .distance import measure
from .runs import find_runs, is_run, read_run


def measure_all(
    subjects: Sequence[str],
    *,
    source: Path | None = None,
    target: Path | None = None,
    text: Path | None = None,
    sentences: int = 100,
    length: int = 256,
    checkpoint: Literal["best", "last"] = "best",
) -> Iterator[dict[str, Any]]:
    """`distance.measure` of every subject, with a `name` and, for runs, a `seed`.

    subjects: paths of runs, of directories that hold some, of saved models.
    source, target, text: files that take the place of a run's validation data.  length: most tokens of a sentence.
    """
    texts = Texts(source=source, target=target, text=text)
    for path in _paths(subjects):
        subject = load_subject(path, texts=texts, sentences=sentences, length=length, checkpoint=checkpoint)
        yield {**_named(path), **measure(subject)}


def _paths(subjects: Sequence[str]) -> list[Path]:
    """Runs at or below each path; a path that is a saved model (or is nothing) as it is."""
    found: list[Path] = []
    for path in map(Path, subjects):
        searched = path.is_dir() and not (path / "config.json").is_file() and not is_run(path)
        found += find_runs(path) if searched else [path]
    return list(dict.fromkeys(found))


def _named(path: Path) -> dict[str, Any]:
    run = find_run(path)
    if run is None:
        return {"name": path.name, "seed": None}
    record = read_run(run)
    return {"name": f"{record.name}, seed {record.seed}", "variant_name": record.name, "seed": record.seed}
