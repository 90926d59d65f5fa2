"""Run a list of independent training processes, a few at a time, and know how each ended.

Knows nothing of recipes or models: a run is a command, a run directory and a log file. Must never leave a child
process behind (where this process is killed, the system asks the runs to stop: `follow_parent`), and one run's failure
must never stop the others.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from qvattn.errors import UserError
from qvattn.files import explained
from qvattn.lab.runs import HISTORY, HistoryPoint, is_complete, read_history
from qvattn.train.signals import PARENT_VARIABLE

try:
    import fcntl
except ImportError:  # not on this platform: two comparisons in one directory are then not noticed
    fcntl = None  # type: ignore[assignment]

GRACE_SECONDS = 10.0
LEFT_BEHIND_SECONDS = 120.0
"""A run that was told to save and end may have to load, validate and write a checkpoint first."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class GridRun:
    """One run to be done: `command` trains into `directory`; what it prints goes to `log`."""

    name: str
    slug: str
    seed: int
    directory: Path
    log: Path
    command: tuple[str, ...]
    total_steps: int | None = None

    @property
    def label(self) -> str:
        return f"{self.name}, seed {self.seed}"


class RunState(enum.Enum):
    """How far a run is; KEPT: it was complete before this comparison started."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    KEPT = "kept"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(kw_only=True)
class RunStatus:
    """A run's progress; `reason` says why it failed, `history` is its learning curve so far."""

    run: GridRun
    state: RunState = RunState.WAITING
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    seconds: float = 0.0
    reason: str = ""
    history: tuple[HistoryPoint, ...] = ()
    first_step: int = 0

    @property
    def step(self) -> int:
        return self.history[-1].step if self.history else 0

    def refresh(self) -> None:
        """Read the run's history again."""
        self.history = tuple(read_history(self.run.directory / HISTORY))


class Watcher(Protocol):
    """Somebody who is told how the runs are, after every change and about once a second."""

    def update(self, statuses: Sequence[RunStatus]) -> None: ...

    def changed(self, status: RunStatus) -> None: ...


def run_grid(
    runs: Sequence[GridRun],
    *,
    jobs: int,
    threads: int,
    watcher: Watcher,
    poll_seconds: float = 0.5,
) -> list[RunStatus]:
    """Do all runs in the given order, at most `jobs` at once, with `threads` threads each.

    Complete runs are kept. On KeyboardInterrupt every child is stopped (asked first, killed after
    `GRACE_SECONDS`) and the interrupt goes on to the caller.

    Raises:
        UserError: jobs or threads below 1.
    """
    for field, value in (("jobs", jobs), ("threads", threads)):
        if value < 1:
            raise UserError(f"{field} must be at least 1, not {value}")
    statuses = [RunStatus(run=run) for run in runs]
    for status in statuses:
        status.refresh()
        if is_complete(status.run.directory):
            _change(status, RunState.KEPT, watcher)
    try:
        _work(statuses, jobs=jobs, threads=threads, watcher=watcher, poll_seconds=poll_seconds)
    except BaseException:
        _stop_all(statuses, watcher)
        raise
    return statuses


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold `directory` for this process and the children that inherit the lock.

    Runs that a killed comparison left behind are waited for a while: they have been told to save and end.

    Raises:
        UserError: another comparison, or a run that one left behind, is at work there, or it cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(directory / ".lock", flags, 0o644)
    except OSError as error:
        raise UserError(explained(error, directory)) from error
    with os.fdopen(handle, "r+") as lock:
        if fcntl is not None:
            _take(lock, directory)
            lock.seek(0)  # what the owner before wrote may have been read
            lock.truncate()
            lock.write(str(os.getpid()))
            lock.flush()
            os.set_inheritable(lock.fileno(), True)
        yield


def _take(lock: TextIO, directory: Path) -> None:
    begun, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip()
            left_behind = owner.isdigit() and not _exists(int(owner))
            if left_behind and not told:
                told = True
                logging.getLogger(__name__).warning(
                    f"{directory}: waiting for runs of a killed comparison to save and end"
                )
            if not left_behind or time.monotonic() - begun > LEFT_BEHIND_SECONDS:
                whose = "a training run that a comparison left behind" if left_behind else "another comparison"
                raise UserError(
                    f"{directory} is in use by {whose}; wait until it ends or choose another --out"
                ) from error
        time.sleep(0.1)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _work(statuses: Sequence[RunStatus], *, jobs: int, threads: int, watcher: Watcher, poll_seconds: float) -> None:
    environment = child_environment(os.environ, threads)
    last_update = 0.0
    while True:
        running = [status for status in statuses if status.state is RunState.RUNNING]
        for status in running:
            _poll(status, watcher)
        running = [status for status in running if status.state is RunState.RUNNING]
        waiting = [status for status in statuses if status.state is RunState.WAITING]
        for status in waiting[: jobs - len(running)]:
            _start(status, environment, watcher)
        if not running and not waiting:
            watcher.update(statuses)
            return
        if time.monotonic() - last_update >= 1.0:
            for status in running:
                status.refresh()
            watcher.update(statuses)
            last_update = time.monotonic()
        time.sleep(poll_seconds)


def child_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of a run: a fixed thread count, a full traceback in its log, unbuffered output."""
    fixed = dict.fromkeys(THREAD_VARIABLES, str(threads))
    more = {"QVATTN_TRACEBACK": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", PARENT_VARIABLE: str(os.getpid())}
    return {**environment, **fixed, **more}


def _start(status: RunStatus, environment: Mapping[str, str], watcher: Watcher) -> None:
    run = status.run
    run.log.parent.mkdir(parents=True, exist_ok=True)
    status.first_step = status.step
    status.started = time.monotonic()
    try:
        with run.log.open("ab") as log:
            log.write(f"\n$ {' '.join(run.command)}\n".encode())
            log.flush()
            # a session of its own: Ctrl-C reaches this process only, which then stops the runs in order
            status.process = subprocess.Popen(
                run.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                close_fds=False,
            )
    except OSError as error:
        status.reason = f"could not be started: {error}"
        _change(status, RunState.FAILED, watcher)
        return
    _change(status, RunState.RUNNING, watcher)


def _poll(status: RunStatus, watcher: Watcher) -> None:
    assert status.process is not None
    code = status.process.poll()
    status.seconds = time.monotonic() - status.started
    if code is None:
        return
    status.refresh()
    if code == 0 and is_complete(status.run.directory):
        _change(status, RunState.DONE, watcher)
        return
    said = last_line(status.run.log)
    ended = "ended without complete results" if code == 0 else describe_exit(code)
    status.reason = f"{ended}; last log line: {said}" if said else f"{ended}; its log is empty"
    _change(status, RunState.FAILED, watcher)


def _change(status: RunStatus, state: RunState, watcher: Watcher) -> None:
    status.state = state
    watcher.changed(status)


def _stop_all(statuses: Sequence[RunStatus], watcher: Watcher) -> None:
    running = [status for status in statuses if status.process is not None and status.process.poll() is None]
    for status in running:
        _signal(status, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        while any(_alive(status) for status in running) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:  # a second Ctrl-C while waiting goes straight on to the kill
        for status in running:
            if _alive(status):
                _signal(status, getattr(signal, "SIGKILL", signal.SIGTERM))
            assert status.process is not None
            status.process.wait()
            _change(status, RunState.STOPPED, watcher)


def _alive(status: RunStatus) -> bool:
    return status.process is not None and status.process.poll() is None


def _signal(status: RunStatus, number: int) -> None:
    """Signal the run and the processes that it started, which share its session."""
    assert status.process is not None
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(status.process.pid, number)
        else:
            status.process.send_signal(number)


def describe_exit(code: int) -> str:
    """An exit code in words; -9 is how the system ends a process when memory runs out."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def last_line(log: Path, tail_bytes: int = 16_384) -> str:
    """The last line of `log` that is not empty; of a progress bar only its last state."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - tail_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    return next((line for line in reversed(lines) if line), "")
