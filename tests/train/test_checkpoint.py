"""Checkpoints under a kill, a full disk and foreign files; the guarded run directory."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from qvattn.errors import UserError
from qvattn.models import TranslationModel
from qvattn.train.checkpoint import (
    CheckpointError,
    find_checkpoint,
    last_checkpoint,
    list_checkpoints,
    write_checkpoint,
)
from qvattn.train.run import run_training

from .conftest import MakeRecipe
from .test_resume import assert_same_run


def write(run_dir: Path, step: int, *, size: int = 1000, best: int | None = None) -> Path:
    def save_model(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"x" * size)

    state = {"step": step, "best": {"step": best} if best else None}
    return write_checkpoint(run_dir, step, save_model=save_model, optimizer_state={}, state=state, keep_last=2)


def child(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
    )


def test_sigkill_at_any_moment_leaves_a_usable_run(toy: MakeRecipe, toy_file: Path, tmp_path: Path) -> None:
    """Killed while checkpoints are written all the time, then resumed: the run that was never killed."""
    overrides = ["train.steps=24", "train.save_every=1", "train.validate_every=20", "train.report_every=1"]
    command = ["-m", "qvattn.cli", "train", str(toy_file), *overrides, "--run-dir", str(tmp_path / "run"), "--resume"]
    for step, delay in ((2, 0.0), (8, 0.013)):
        process = child(command)
        try:
            wait_for_checkpoint(tmp_path / "run", step, process)
            time.sleep(delay)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL
        checkpoint = last_checkpoint(tmp_path / "run")
        assert checkpoint is not None
        TranslationModel.from_pretrained(checkpoint.path)
        assert checkpoint.optimizer()["state"]
    recipe = toy(*overrides)
    run_training(recipe, tmp_path / "run", resume=True)
    assert not list((tmp_path / "run/checkpoints").glob(".draft-*"))
    run_training(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def wait_for_checkpoint(run_dir: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        found = last_checkpoint(run_dir)
        if found is not None and found.step >= step:
            return
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1].decode())
        time.sleep(0.005)
    raise AssertionError(f"no checkpoint of step {step} in time")


def test_killed_in_the_middle_of_a_file(tmp_path: Path) -> None:
    write(tmp_path, 1)
    script = f"""
import os, signal
from pathlib import Path
from qvattn.train.checkpoint import write_checkpoint
def save_model(folder):
    with open(folder / "model.bin", "wb") as file:
        file.write(b"half"); file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
write_checkpoint(Path({str(tmp_path)!r}), 2, save_model=save_model, optimizer_state={{}}, state={{}}, keep_last=2)
"""
    process = child(["-c", script])
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list((tmp_path / "checkpoints").glob(".draft-*"))
    assert [found.step for found in list_checkpoints(tmp_path)] == [1]
    write(tmp_path, 2)
    assert [found.step for found in list_checkpoints(tmp_path)] == [1, 2]
    assert not list((tmp_path / "checkpoints").glob(".draft-*"))


def test_sigterm_saves_and_exits(toy: MakeRecipe, toy_file: Path, tmp_path: Path) -> None:
    overrides = ["train.steps=400", "train.validate_every=400", "train.report_every=1"]
    process = child(["-m", "qvattn.cli", "train", str(toy_file), *overrides, "--run-dir", str(tmp_path / "run")])
    history = tmp_path / "run/history.csv"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (history.exists() and history.read_text().count("\n") > 3):
        time.sleep(0.01)
    process.terminate()
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 130, stderr.decode()
    assert b"SIGTERM" in stderr
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["status"] == "interrupted"
    checkpoint = last_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    assert checkpoint.step == results["steps"] > 0
    again = run_training(toy(*overrides), tmp_path / "run", resume=True, stop_at=checkpoint.step + 2)
    assert again["steps"] == checkpoint.step + 2


@pytest.fixture
def small_disk() -> Any:
    """Files cannot grow beyond 20 kB: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int = 20_000) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_keeps_the_old_checkpoint(tmp_path: Path, small_disk: Any) -> None:
    write(tmp_path, 1)
    small_disk()
    with pytest.raises(CheckpointError, match=r"step 2: .*File too large; the checkpoint of step 1 is intact"):
        write(tmp_path, 2, size=50_000)
    assert [found.step for found in list_checkpoints(tmp_path)] == [1]
    assert not list((tmp_path / "checkpoints").glob(".draft-*"))


def test_full_disk_while_training(toy: MakeRecipe, tmp_path: Path, small_disk: Any) -> None:
    """The real files: weights by safetensors and moments by torch, none of which raises a plain OSError."""
    recipe = toy("train.steps=6", "train.save_every=2")
    run_training(recipe, tmp_path / "run", stop_at=2)
    small_disk()
    with pytest.raises(CheckpointError, match=r"step 4: .*the checkpoint of step 2 is intact"):
        run_training(recipe, tmp_path / "run", resume=True)
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["status"] == "failed"
    assert "step 4" in results["reason"]
    small_disk(resource.RLIM_INFINITY)
    assert run_training(recipe, tmp_path / "run", resume=True)["steps"] == 6


def test_all_files_of_a_checkpoint_can_be_read_alike(toy: MakeRecipe, tmp_path: Path) -> None:
    run_training(toy("train.steps=1"), tmp_path / "run")
    modes = {path.stat().st_mode for path in (tmp_path / "run/checkpoints/last/").iterdir()}
    assert modes == {(tmp_path / "run/recipe.yaml").stat().st_mode}


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 6):
        write(tmp_path, step, best=2 if step >= 2 else None)
    assert [(c.step, c.resumable) for c in list_checkpoints(tmp_path)] == [(2, False), (4, True), (5, True)]
    assert find_checkpoint(tmp_path, "best").name == "step-0000002"
    assert find_checkpoint(tmp_path, "last").name == "step-0000005"


def test_checkpoint_links_are_not_needed(tmp_path: Path) -> None:
    write(tmp_path, 1, best=1)
    write(tmp_path, 2, best=1)
    for link in ("best", "last"):
        (tmp_path / "checkpoints" / link).unlink()
    assert find_checkpoint(tmp_path).name == "step-0000001"
    with pytest.raises(UserError, match="no checkpoint"):
        find_checkpoint(tmp_path / "elsewhere")


def test_optimizer_file_is_never_unpickled_freely(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    write(tmp_path, 1)
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    torch.save({"state": Evil()}, checkpoint.path / "optimizer.pt")
    with pytest.raises(UserError, match=r"optimizer\.pt cannot be read"):
        checkpoint.optimizer()
    assert not (tmp_path / "owned").exists()


def test_non_empty_run_directory_is_refused(toy: MakeRecipe, tmp_path: Path) -> None:
    recipe = toy("train.steps=2")
    run_training(recipe, tmp_path / "run")
    kept = (tmp_path / "run/results.json").read_bytes()
    with pytest.raises(UserError, match=r"is not empty .* --resume or --overwrite"):
        run_training(recipe, tmp_path / "run")
    assert (tmp_path / "run/results.json").read_bytes() == kept
    with pytest.raises(UserError, match="exclude each other"):
        run_training(recipe, tmp_path / "run", resume=True, overwrite=True)
    changed = toy("train.steps=3")
    assert run_training(changed, tmp_path / "run", overwrite=True)["steps"] == 3
    assert [found.step for found in list_checkpoints(tmp_path / "run")] == [3]


def test_overwrite_deletes_runs_only(toy: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"'thesis\.tex' is not part of a run"):
        run_training(toy(), tmp_path, overwrite=True)
    with pytest.raises(UserError, match=r"holds no recipe\.yaml"):
        run_training(toy(), tmp_path, resume=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_log_beside_the_run_does_not_count(toy: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("started\n")
    assert run_training(toy("train.steps=2"), tmp_path)["status"] == "complete"


def test_run_directory_in_use_is_refused(toy: MakeRecipe, tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by another process"):
            run_training(toy(), tmp_path)


def test_run_directory_that_cannot_be_made(toy: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run directory"):
        run_training(toy(), tmp_path / "file" / "run")
