"""Clock jumps: no duration is measured with a clock that can be set, and no decision rests on one."""

from __future__ import annotations

import ast
import json
import random
import time
from pathlib import Path

import pytest

import qvattn
from qvattn.train.history import read_history
from qvattn.train.run import run_training
from train.conftest import MakeRecipe
from train.test_resume import assert_same_run

from .record import count

SOURCES = sorted(Path(qvattn.__file__).parent.rglob("*.py"))
SETTABLE = {"time.time", "time.time_ns", "time.clock", "datetime.now", "datetime.utcnow", "datetime.today"}
TIMESTAMPS = {"train/environment.py": {"datetime.now"}, "lab/cluster.py": {"time.time"}}
"""Where a moment is written down for people to read, or for a later process (when a job was submitted)."""


@pytest.mark.parametrize("jump", [-3e8, 3e8, None])
def test_time_jumps_while_training(
    toy: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float | None
) -> None:
    """The clock is set back or forward by ten years now and then, or wildly: same run, and sane seconds."""
    recipe = toy("train.steps=4", "train.tensorboard=true")
    run_training(recipe, tmp_path / "whole")
    draw, real = random.Random(1), time.time

    def unsteady() -> float:
        return real() + (draw.choice([0.0, jump]) if jump is not None else draw.uniform(-1e9, 1e9))

    begun = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", unsteady)
        run_training(recipe, tmp_path / "run", stop_at=2)
        run_training(recipe, tmp_path / "run", resume=True)
    lasted = time.monotonic() - begun
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert 0 < results["seconds"] <= lasted
    assert 0 < results["train_tokens_per_second"] < 1e9
    assert all(0 < float(row["seconds"]) <= lasted for row in read_history(tmp_path / "run/history.csv"))
    count("clock jumps while training", "same run, sane durations")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.name))
def test_no_settable_clock_is_read(source: Path) -> None:
    name = source.relative_to(Path(qvattn.__file__).parent).as_posix()
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)}
    assert calls & SETTABLE <= TIMESTAMPS.get(name, set())
