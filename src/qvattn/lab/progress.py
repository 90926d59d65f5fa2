"""Show a grid of runs while it works: a live table on a terminal, plain lines elsewhere.

Only shows; must never change a run or write to stdout.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qvattn.lab.grid import RunState, RunStatus, Watcher
from qvattn.lab.runs import last_value

_FINISHED = (RunState.DONE, RunState.KEPT)
_STYLE = {
    RunState.WAITING: "dim",
    RunState.RUNNING: "cyan",
    RunState.DONE: "green",
    RunState.KEPT: "green",
    RunState.FAILED: "bold red",
    RunState.STOPPED: "yellow",
}


class PlainWatcher:
    """A line when a run starts or ends, and one line of progress every `interval` seconds."""

    def __init__(self, console: Console, interval: float = 30.0) -> None:
        self.console, self.interval = console, interval
        self.started = self.last = time.monotonic()

    def changed(self, status: RunStatus) -> None:
        self._line(f"{status.run.label}: {describe(status)}")

    def update(self, statuses: Sequence[RunStatus]) -> None:
        if time.monotonic() - self.last >= self.interval:
            self.last = time.monotonic()
            for status in statuses:
                if status.state is RunState.RUNNING:
                    self._line(f"{status.run.label}: {describe(status)}")
            self._line(overview(statuses, time.monotonic() - self.started))

    def _line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


class LiveWatcher:
    """A table that is drawn anew in place: a line per variant, a column per seed."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.started = time.monotonic()

    def changed(self, status: RunStatus) -> None:
        if status.state is RunState.FAILED:
            self.live.console.print(Text(f"{status.run.label}: {describe(status)}", style="red"))

    def update(self, statuses: Sequence[RunStatus]) -> None:
        summary = Text(overview(statuses, time.monotonic() - self.started), style="dim")
        self.live.update(Group(live_table(statuses), summary), refresh=True)


@contextlib.contextmanager
def watching(console: Console) -> Iterator[Watcher]:
    """The watcher that suits `console`."""
    if console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
            yield LiveWatcher(live)
    else:
        yield PlainWatcher(console)


def live_table(statuses: Sequence[RunStatus]) -> Table:
    """One line per variant, one column per seed; what runs shows its share done and its last accuracy."""
    seeds = sorted({status.run.seed for status in statuses})
    cells = {(status.run.name, status.run.seed): status for status in statuses}
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, title="validation token accuracy %", title_justify="left", title_style="dim"
    )
    table.add_column("variant", overflow="fold")
    for seed in seeds:
        table.add_column(f"seed {seed}", justify="right", min_width=14)
    for name in dict.fromkeys(status.run.name for status in statuses):
        found = [cells.get((name, seed)) for seed in seeds]
        texts = [Text("") if s is None else Text(short(s), style=_STYLE[s.state]) for s in found]
        table.add_row(escape(name), *texts)
    return table


def short(status: RunStatus) -> str:
    """A run in a few characters: `·`, ` 45 %  43.10`, `48.93`, `failed`."""
    accuracy = last_value(status.history, "valid_accuracy")
    shown = "" if accuracy is None else f"{100 * accuracy:.2f}"
    if status.state is RunState.WAITING:
        return "·"
    if status.state is RunState.RUNNING:
        return f"{_share(status)}  {shown}".rstrip()
    if status.state in _FINISHED:
        return shown or "done"
    return status.state.value


def describe(status: RunStatus) -> str:
    """A run's state in words."""
    match status.state:
        case RunState.KEPT:
            return "complete already, kept"
        case RunState.FAILED:
            return f"FAILED, {status.reason}"
        case RunState.DONE:
            return f"done in {clock(status.seconds)}{_accuracy(status)}"
        case RunState.RUNNING if status.seconds == 0.0:
            return f"resumes at step {status.step}" if status.step else "starts"
        case RunState.RUNNING:
            speed = last_value(status.history, "tokens_per_second")
            pace = "" if speed is None else f", {speed:,.0f} tokens/s"
            return f"step {status.step} ({_share(status).strip()}){_accuracy(status)}{pace}"
        case state:
            return state.value


def overview(statuses: Sequence[RunStatus], elapsed: float) -> str:
    """`7 of 18 runs done, 2 running, 1 failed; 3:10 elapsed, about 4:40 left`."""
    count = {state: sum(status.state is state for status in statuses) for state in RunState}
    text = f"{sum(count[state] for state in _FINISHED)} of {len(statuses)} runs done"
    for state in (RunState.RUNNING, RunState.FAILED):
        if count[state]:
            text += f", {count[state]} {state.value}"
    text += f"; {clock(elapsed)} elapsed"
    left = seconds_left(statuses, elapsed)
    return text if left is None else f"{text}, about {clock(left)} left"


def seconds_left(statuses: Sequence[RunStatus], elapsed: float) -> float | None:
    """Time left at the pace of the steps made so far in this session; None before there is a pace."""
    made = left = 0
    for status in statuses:
        if status.run.total_steps is None:
            return None
        if status.state in (RunState.DONE, RunState.RUNNING):
            made += status.step - status.first_step
        if status.state in (RunState.WAITING, RunState.RUNNING):
            left += max(0, status.run.total_steps - status.step)
    return elapsed * left / made if made and left else None


def clock(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _share(status: RunStatus) -> str:
    total = status.run.total_steps
    return f"step {status.step}" if not total else f"{100 * min(1.0, status.step / total):3.0f} %"


def _accuracy(status: RunStatus) -> str:
    accuracy = last_value(status.history, "valid_accuracy")
    return "" if accuracy is None else f", validation accuracy {100 * accuracy:.2f} %"


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within this block SIGTERM interrupts like Ctrl-C, so that the runs are stopped in order."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
