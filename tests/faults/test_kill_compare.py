"""A comparison killed with -9: its runs do not outlive it, and the same command goes on where it stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qvattn.errors import UserError
from qvattn.lab.grid import exclusive
from qvattn.train.checkpoint import whole_checkpoint
from train.test_resume import assert_same_run

from .processes import PATIENCE, Forker
from .record import KILLS, count

RUNS = ("a--seed1", "b--seed1")
WRITTEN = "after the table was written"


def command(toy_file: Path, out: Path) -> list[str]:
    grid = (
        'compare={"baseline": "a", "seeds": [1], "jobs": 2, "threads": 1, '
        '"variants": [{"name": "a"}, {"name": "b", "attention": "qkv"}]}'
    )
    steps = ["train.steps=60", "train.save_every=5", "train.validate_every=20", "train.report_every=5"]
    return ["compare", str(toy_file), *steps, grid, "--out", str(out), "--json"]


@pytest.mark.slow
def test_killed_comparison_goes_on(forker: Forker, toy_file: Path, tmp_path: Path) -> None:
    begun = time.monotonic()
    assert forker.run(command(toy_file, tmp_path / "whole"), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    seconds = time.monotonic() - begun
    log, draw = tmp_path / "log1", random.Random(3)
    out = tmp_path / "out0"
    for number in range(KILLS):
        child = forker.start(command(toy_file, out), log)
        time.sleep(draw.uniform(0.2, 1.1 * seconds))
        os.kill(child, signal.SIGKILL)  # the comparison alone: its runs must notice by themselves
        forker.kill(child)
        reached = state(out)
        count("kill -9 while comparing", reached)
        for run in RUNS:
            if (out / "runs" / run).is_dir():
                assert whole_checkpoint(out / "runs" / run)[1] == []
        if reached == WRITTEN or number == KILLS - 1:
            finish(forker, toy_file, out, tmp_path / "whole", log)
            out = tmp_path / f"out{number + 1}"


def finish(forker: Forker, toy_file: Path, out: Path, whole: Path, log: Path) -> None:
    """Let the comparison end; it must be the undisturbed one."""
    assert forker.run(command(toy_file, out), log) == 0, log.read_text()
    for run in RUNS:
        assert_same_run(whole / "runs" / run, out / "runs" / run)
    for name in ("compare.md", "compare.html"):
        assert (out / name).is_file()
    result = json.loads((out / "compare.json").read_text())
    assert len(result["rows"]) == 2
    count("comparisons killed, then equal to an undisturbed one bit for bit", "yes")


def state(out: Path) -> str:
    results = [(out / "runs" / run / "results.json").is_file() for run in RUNS]
    if (out / "compare.json").is_file():
        return WRITTEN
    if not (out / "compare.yaml").is_file():
        return "before the first file"
    return f"{sum(results)} of 2 runs done"


PARENT = """
import sys
from pathlib import Path
from qvattn.lab.grid import GridRun, exclusive, run_grid
class Quiet:
    def update(self, statuses): pass
    def changed(self, status): pass
out = Path(sys.argv[1])
with exclusive(out):
    run = GridRun(name="a", slug="a", seed=1, directory=out / "a", log=out / "a.log",
                  command=(sys.executable, sys.argv[2], str(out)))
    run_grid([run], jobs=1, threads=1, watcher=Quiet())
"""
CHILD = """
import os, signal, sys, time
from pathlib import Path
from qvattn.train.signals import follow_parent
out = Path(sys.argv[1])
def end(*_):
    time.sleep(0.5)  # as a run takes a while to save
    (out / "asked").write_text("")
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
follow_parent()
(out / "child").write_text(str(os.getpid()))
time.sleep(300)
"""


def test_runs_do_not_outlive_a_killed_comparison(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    out = tmp_path / "out"
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), str(out), str(tmp_path / "child.py")])
    deadline = time.monotonic() + PATIENCE
    while not (out / "child").exists() or not (out / "child").read_text():
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.02)
    with pytest.raises(UserError, match="in use by another comparison; wait until it ends"), exclusive(out):
        pass
    parent.kill()
    parent.wait()
    with exclusive(out):  # waits for the run that was told to save and end
        assert (out / "asked").exists()
        assert (out / ".lock").read_text() == str(os.getpid())  # else the next start could not know whom it waits for
    count("comparison killed: its runs are asked to save and end", "yes")
