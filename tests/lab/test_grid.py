"""Running a grid of processes: order, resumption, failures, interruption."""

from __future__ import annotations

import io
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from qvattn.errors import UserError
from qvattn.lab.grid import GridRun, RunState, RunStatus, describe_exit, exclusive, last_line, run_grid
from qvattn.lab.progress import (
    LiveWatcher,
    PlainWatcher,
    clock,
    describe,
    live_table,
    overview,
    seconds_left,
    short,
    terminable,
    watching,
)

FINISH = """
    import json, os, pathlib, sys
    directory = pathlib.Path(sys.argv[1]); directory.mkdir(parents=True, exist_ok=True)
    (directory / "threads").write_text(os.environ["OMP_NUM_THREADS"])
    (directory / "history.csv").write_text("step,valid_accuracy,tokens_per_second\\n5,0.25,100\\n10,0.5,200\\n")
    (directory / "results.json").write_text(json.dumps({"status": "complete"}))
"""
FAIL = "import sys; print('step 1'); print('ValueError: the loss is NaN at step 2'); print(); sys.exit(1)"
HANG = """
    import signal, subprocess, sys, time, pathlib
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    directory = pathlib.Path(sys.argv[1]); directory.mkdir(parents=True)
    (directory / "child").write_text(str(child.pid))
    time.sleep(60)
"""


class Recorder:
    """Remembers what a watcher is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, RunState]] = []

    def changed(self, status: RunStatus) -> None:
        self.events.append((status.run.name, status.run.seed, status.state))

    def update(self, statuses: Sequence[RunStatus]) -> None:
        pass

    def started(self) -> list[tuple[str, int]]:
        return [(name, seed) for name, seed, state in self.events if state is RunState.RUNNING]


def make_run(root: Path, name: str, seed: int, script: str = FINISH) -> GridRun:
    slug = f"{name}-{seed}"
    command = (sys.executable, "-S", "-c", textwrap.dedent(script), str(root / slug))
    return GridRun(
        name=name,
        slug=slug,
        seed=seed,
        directory=root / slug,
        log=root / f"{slug}.log",
        command=command,
        total_steps=10,
    )


def test_all_variants_of_the_first_seed_come_first_and_complete_runs_are_kept(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name, seed) for seed in (1, 2) for name in ("a", "b")]
    recorder = Recorder()
    statuses = run_grid(runs, jobs=1, threads=3, watcher=recorder, poll_seconds=0.01)
    assert recorder.started() == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert {status.state for status in statuses} == {RunState.DONE}
    assert (tmp_path / "a-1" / "threads").read_text() == "3"
    again = Recorder()
    statuses = run_grid(runs, jobs=2, threads=1, watcher=again, poll_seconds=0.01)
    assert again.started() == []
    assert {status.state for status in statuses} == {RunState.KEPT}


def test_failed_run_is_named_with_its_last_line_and_others_go_on(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "bad", 1, FAIL), make_run(tmp_path, "good", 1)]
    bad, good = run_grid(runs, jobs=1, threads=1, watcher=Recorder(), poll_seconds=0.01)
    assert bad.state is RunState.FAILED
    assert bad.reason == "exit code 1; last log line: ValueError: the loss is NaN at step 2"
    assert good.state is RunState.DONE


def test_success_without_results_is_a_failure(tmp_path: Path) -> None:
    (status,) = run_grid(
        [make_run(tmp_path, "empty", 1, "pass")], jobs=1, threads=1, watcher=Recorder(), poll_seconds=0.01
    )
    assert status.state is RunState.FAILED
    assert "without complete results" in status.reason


def test_command_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    run = GridRun(
        name="x",
        slug="x",
        seed=1,
        directory=tmp_path / "x",
        log=tmp_path / "x.log",
        command=(str(tmp_path / "nothing"),),
    )
    (status,) = run_grid([run], jobs=1, threads=1, watcher=Recorder(), poll_seconds=0.01)
    assert status.state is RunState.FAILED
    assert "could not be started" in status.reason


@pytest.mark.parametrize("field", ["jobs", "threads"])
def test_refuses_zero(field: str) -> None:
    with pytest.raises(UserError, match=f"{field} must be at least 1, not 0"):
        run_grid([], **{"jobs": 1, "threads": 1, "watcher": Recorder(), field: 0})  # type: ignore[arg-type]


def test_interrupt_ends_the_whole_process_tree(tmp_path: Path) -> None:
    class Interrupting(Recorder):
        def update(self, statuses: Sequence[RunStatus]) -> None:
            if (tmp_path / "hang-1" / "child").exists():
                raise KeyboardInterrupt

    recorder = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        run_grid([make_run(tmp_path, "hang", 1, HANG)], jobs=1, threads=1, watcher=recorder, poll_seconds=0.05)
    assert recorder.events[-1] == ("hang", 1, RunState.STOPPED)
    grandchild = int((tmp_path / "hang-1" / "child").read_text())
    deadline = time.monotonic() + 5
    while _runs(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(grandchild)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_terminate_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_directory_is_held_by_one(tmp_path: Path) -> None:
    with exclusive(tmp_path / "out"), pytest.raises(UserError, match="in use"), exclusive(tmp_path / "out"):
        pass
    with exclusive(tmp_path / "out"):
        pass


def test_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"first\n 10%\r 50%\r 90%\n\n\xff\n  \n")
    assert last_line(log) == "\ufffd"
    log.write_bytes(b"first\n 10%\r 50%\r 90%\n\n")
    assert last_line(log) == "90%"


def test_describe_exit() -> None:
    assert describe_exit(2) == "exit code 2"
    assert describe_exit(-9) == "killed by SIGKILL (out of memory?)"
    assert describe_exit(-15) == "killed by SIGTERM"


def test_progress_texts(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "a [red]", seed) for seed in (1, 2)]
    run_grid(runs[:1], jobs=1, threads=1, watcher=Recorder(), poll_seconds=0.01)
    done = RunStatus(run=runs[0], state=RunState.DONE, seconds=61)
    done.refresh()
    waiting = RunStatus(run=runs[1])
    assert describe(done) == "done in 1:01, validation accuracy 50.00 %"
    assert short(done) == "50.00"
    assert short(waiting) == "·"
    assert overview([done, waiting], 30).startswith("1 of 2 runs done; 0:30 elapsed, about 0:30 left")
    running = RunStatus(run=runs[1], state=RunState.RUNNING, history=done.history[:1], seconds=1)
    assert describe(running) == "step 5 (50 %), validation accuracy 25.00 %, 100 tokens/s"
    assert seconds_left([running], 10) == pytest.approx(10)
    assert clock(3725) == "1:02:05"
    console = Console(file=io.StringIO(), width=100)
    console.print(live_table([done, waiting]))
    assert "a [red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_watcher_suits_the_console(tmp_path: Path) -> None:
    plain = Console(file=io.StringIO(), force_terminal=False)
    with watching(plain) as watcher:
        assert isinstance(watcher, PlainWatcher)
        watcher.interval = 0
        run_grid([make_run(tmp_path, "a", 1)], jobs=1, threads=1, watcher=watcher, poll_seconds=0.01)
    text = plain.file.getvalue()  # type: ignore[attr-defined]
    assert "a, seed 1: starts" in text
    assert "1 of 1 runs done" in text
    with watching(Console(file=io.StringIO(), force_terminal=True)) as watcher:
        assert isinstance(watcher, LiveWatcher)
        run_grid([make_run(tmp_path, "b", 1, FAIL)], jobs=1, threads=1, watcher=watcher, poll_seconds=0.01)
        assert "FAILED" in watcher.live.console.file.getvalue()  # type: ignore[attr-defined]
