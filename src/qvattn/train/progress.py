"""What a person sees of a run, on stderr: one line per report, and a progress bar where stderr is a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Reporter:
    """Prints lines above a progress bar (plain lines when stderr is not a terminal); silent when not `enabled`."""

    def __init__(self, *, name: str, total: int, done: int = 0, enabled: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=not enabled, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
                refresh_per_second=2,
                transient=True,
            )
            self._task = self._bar.add_task(name, total=total, completed=done)

    def say(self, message: str) -> None:
        """One plain line; no markup is interpreted."""
        self._console.print(message, markup=False)

    def at(self, step: int) -> None:
        """Move the bar to `step`."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def clock(seconds: float) -> str:
    """`75` -> `1:15`, `3675` -> `1:01:15`."""
    whole = max(round(seconds), 0)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
