"""Two processes train the model that one process trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qvattn.train.history import read_history
from qvattn.train.run import run_training

from .conftest import MakeRecipe

OVERRIDES = ["train.steps=6", "model.dropout=0", "train.accumulate=2"]


def test_two_processes_equal_one(toy: MakeRecipe, toy_file: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = ["-m", "qvattn.cli", "train", str(toy_file), *OVERRIDES, "--json", "--run-dir", str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *command], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "complete"
    run_training(toy(*OVERRIDES), tmp_path / "one")
    one, two = (read_history(tmp_path / run / "history.csv") for run in ("one", "two"))
    assert [row["step"] for row in one] == [row["step"] for row in two] == ["3", "5", "6"]
    for a, b in zip(one, two, strict=True):
        assert a["tokens"] == b["tokens"]
        for column in ("train_loss", "grad_norm", "valid_loss"):
            assert (a[column] == "") == (b[column] == "")
            if a[column]:
                assert float(a[column]) == pytest.approx(float(b[column]), rel=1e-4)
