"""`kill -9` at random moments of a real training process: the next start continues, to the same bits."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from qvattn.models import TranslationModel
from qvattn.train.checkpoint import whole_checkpoint
from train.test_resume import assert_same_run

from .processes import Forker, phase
from .record import KILLS, count

OVERRIDES = [
    "train.steps=20",
    "train.save_every=1",
    "train.validate_every=5",
    "train.report_every=1",
    "train.tensorboard=true",
]


@pytest.fixture(scope="module")
def whole(forker: Forker, corpus_files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The run that nobody disturbs, and its seconds."""
    from train.conftest import toy_text

    folder = tmp_path_factory.mktemp("whole")
    (folder / "toy.yaml").write_text(toy_text(corpus_files), encoding="utf-8")
    begun = time.monotonic()
    command = ["train", str(folder / "toy.yaml"), *OVERRIDES, "--run-dir", str(folder / "run")]
    assert forker.run(command, folder / "log") == 0, (folder / "log").read_text()
    return folder, time.monotonic() - begun


def usable(run_dir: Path) -> bool:
    """Whether the last good state can be loaded; there must be no damaged one."""
    checkpoint, damaged = whole_checkpoint(run_dir)
    assert damaged == []
    if checkpoint is not None:
        TranslationModel.from_pretrained(checkpoint.path)
        assert checkpoint.optimizer()["state"]
    return checkpoint is not None


def test_killed_at_random_moments(forker: Forker, whole: tuple[Path, float], tmp_path: Path) -> None:
    folder, seconds = whole
    draw = random.Random(8)
    kills = number = 0
    while kills < KILLS:
        run, log = tmp_path / f"run{number}", tmp_path / f"log{number}"
        command = ["train", str(folder / "toy.yaml"), *OVERRIDES, "--run-dir", str(run), "--resume"]
        for _ in range(5):
            if kills < KILLS and killed_once(forker, command, log, run, draw, seconds):
                kills += 1
                count("kill -9 while training", phase(run))
                usable(run)
        assert forker.run(command, log) == 0, log.read_text()
        assert_same_run(folder / "run", run)
        count("runs killed, then equal to an undisturbed one bit for bit", "yes")
        number += 1


def killed_once(forker: Forker, command: list[str], log: Path, run: Path, draw: random.Random, seconds: float) -> bool:
    """Start it and kill it at a random moment: of its time, or some milliseconds into writing a checkpoint."""

    def writing() -> bool:
        return any((run / "checkpoints").glob(".draft-0*"))

    child = forker.start(command, log)
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0, 1.2 * seconds))
    else:
        drafts = draw.randint(1, 4)
        for moment in [writing, lambda: not writing()] * drafts if drafts > 1 else [writing]:
            if forker.wait_until(child, moment) is not None:
                return False  # it ended before
        time.sleep(draw.choice([0, draw.uniform(0, 0.01), draw.uniform(0, 0.05)]))
    return forker.kill(child) == -9


def test_second_process_on_one_run_directory_is_refused(
    forker: Forker, whole: tuple[Path, float], tmp_path: Path
) -> None:
    folder, _ = whole
    command = ["train", str(folder / "toy.yaml"), *OVERRIDES, "train.steps=2000", "--run-dir", str(tmp_path / "run")]
    first = forker.start([*command, "--resume"], tmp_path / "first")
    try:
        ended = forker.wait_until(first, lambda: (tmp_path / "run/history.csv").exists())
        assert ended is None, (tmp_path / "first").read_text()
        for option in ("--resume", "--overwrite"):
            assert forker.run([*command, option], tmp_path / "second") == 2
            said = (tmp_path / "second").read_text().splitlines()[-1]
            assert str(tmp_path / "run") in said
            assert "is in use by another process; wait until it ends, or choose another" in said
            count("two processes on one run directory: second refused", "yes")
    finally:
        assert forker.kill(first) == -9
