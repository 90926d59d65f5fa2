"""history.csv: one row per report or validation, appended and flushed as the run goes.

The columns of a run are fixed; a column without a value is empty. On resume the rows after the checkpoint are cut off,
so that the file never tells of a step twice.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from ..files import write_atomically

COLUMNS = (
    "step",
    "epoch",
    "tokens",
    "seconds",
    "train_loss",
    "train_accuracy",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "valid_loss",
    "valid_perplexity",
    "valid_accuracy",
    "valid_bleu",
)


class History:
    """Appends rows to a run's history.csv. `resume_step` 0 starts a new file, N keeps the rows up to step N.

    more_columns: columns of this kind of run besides `COLUMNS`.
    """

    def __init__(self, path: Path, *, resume_step: int = 0, more_columns: Sequence[str] = ()) -> None:
        rows = [row for row in read_history(path) if int(row["step"]) <= resume_step] if path.exists() else []
        text = io.StringIO()
        columns = (*COLUMNS, *more_columns)
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(path, text.getvalue())
        self._file: TextIO = path.open("a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n", restval="")

    def append(self, row: Mapping[str, float | int]) -> None:
        self._writer.writerow(
            {key: f"{value:.8g}" if isinstance(value, float) else value for key, value in row.items()}
        )
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_history(path: Path) -> list[dict[str, str]]:
    """The complete rows of a history.csv; a last line that a kill cut short is left out."""
    text = path.read_text(encoding="utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1]
    rows: list[dict[str, str]] = []
    with contextlib.suppress(csv.Error):  # whatever follows is no CSV
        rows.extend(csv.DictReader(io.StringIO(complete)))
    return [row for row in rows if (row.get("step") or "").isdecimal() and None not in row and None not in row.values()]
