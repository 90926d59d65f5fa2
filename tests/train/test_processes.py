"""`qvattn train` under the launchers people use, and what happens when a process fails or is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from qvattn.errors import UserError
from qvattn.train.checkpoint import last_checkpoint
from qvattn.train.history import read_history
from qvattn.train.launch import from_launcher
from qvattn.train.recipe import TrainSpec
from qvattn.train.run import run_training

from .conftest import MakeRecipe
from .test_distributed import SAME, assert_alike, last_weights

OVERRIDES = ["train.steps=6", "model.dropout=0", "train.accumulate=2", "train.eps=1e-6"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [
    "-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2",
    "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--gradient_accumulation_steps", "4",
]  # fmt: skip


def start(launcher: Sequence[str], recipe: Path, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, "-m", "qvattn.cli", "train", str(recipe), "--run-dir", str(run_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str], seconds: float = 1800) -> tuple[str, str]:
    """What it printed; a job that hangs is killed, and the test fails. The machine may be busy: the limits are wide."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(TORCHRUN, marks=pytest.mark.slow), ACCELERATE],
    ids=["torchrun", "accelerate"],
)
def test_launchers(toy: MakeRecipe, toy_file: Path, tmp_path: Path, launcher: list[str]) -> None:
    """Divided (accelerate asks for it) or not, and whatever the launcher thinks of accumulation: one process's run."""
    process = start(launcher, toy_file, tmp_path / "two", *OVERRIDES, "--json")
    out, said = ended(process)
    assert process.returncode == 0, said
    assert json.loads(out)["status"] == "complete"  # one process speaks for all
    assert said.count("validation at step 6") == 1
    run_training(toy(*OVERRIDES), tmp_path / "one")
    assert_alike(tmp_path / "one", tmp_path / "two", **SAME)
    divided = launcher is ACCELERATE
    assert ("parallel: fsdp2" in (tmp_path / "two/recipe.yaml").read_text()) is divided
    checkpoint = last_checkpoint(tmp_path / "two")
    assert checkpoint is not None and checkpoint.sharded is divided


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_version=1: FSDP 1 is not supported"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
            "fsdp_offload_params: offloading parameters to the CPU is not supported",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED: not supported"),
    ],
)
def test_what_a_launcher_may_not_ask_for(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        from_launcher(TrainSpec())


# -- a process that ends ----------------------------------------------------------------------------------------


def workers(process: subprocess.Popen[str]) -> dict[int, int]:
    """Rank -> process of a job's two workers, as far as they have begun."""
    found = {}
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
        found.update({rank: int(child) for rank in ranks})
    return found


def wait_for_workers(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 1200
    while len(workers(process)) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 1200
    while time.monotonic() < deadline:
        found = last_checkpoint(run_dir)
        if found is not None and found.step >= step:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    raise AssertionError(f"no checkpoint of step {step} in time")


LONG = ["train.steps=40", "model.dropout=0", "train.save_every=1", "train.validate_every=40", "train.eps=1e-6"]


def test_a_killed_process_ends_the_job(toy_file: Path, tmp_path: Path) -> None:
    """`kill -9` of one of two processes that divide a model: a message, no hang, and what was saved is whole."""
    run = tmp_path / "two"
    process = start(TORCHRUN, toy_file, run, *LONG, "train.parallel=fsdp2")
    wait_for_step(run, 3, process)
    os.kill(workers(process)[1], signal.SIGKILL)
    killed = time.monotonic()
    _, said = ended(process)
    assert process.returncode != 0
    assert time.monotonic() - killed < 500  # a hang would last train.process_timeout, 600 seconds
    assert "process 0 of 2 lost contact with another one" in said
    assert "start the job again with --resume" in said
    assert "SIGKILL" in said or "-9" in said  # torchrun's own account
    kept = last_checkpoint(run)
    assert kept is not None and kept.step >= 3 and kept.damage(resume=True) is None


@pytest.mark.slow
def test_an_error_ends_every_process_and_is_told_once(toy_file: Path, tmp_path: Path) -> None:
    """A directory that may not be used: the main process says so, the other one ends without a word of its own."""
    (tmp_path / "thesis.tex").write_text("years of work")
    process = start(TORCHRUN, toy_file, tmp_path)
    _, said = ended(process)
    assert process.returncode != 0
    assert said.count("qvattn: error:") == 1
    assert "is not empty" in said
    assert "lost contact" not in said


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_every_process(toy_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(TORCHRUN, toy_file, run, *LONG, "train.parallel=fsdp2")
    wait_for_step(run, 1, process)
    (run / "checkpoints").rename(run / "elsewhere")
    (run / "checkpoints").write_text("not a directory")
    _, said = ended(process)
    assert process.returncode != 0
    assert said.count("could not be written") >= 1
    assert json.loads((run / "results.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_the_whole_job_is_told_to_stop(toy_file: Path, tmp_path: Path) -> None:
    """SIGTERM to torchrun, as a cluster sends it: every process stops after the same step, which is saved."""
    run = tmp_path / "run"
    long = ["train.steps=4000", "train.validate_every=4000", "train.report_every=1000"]
    process = start(TORCHRUN, toy_file, run, *long, "train.parallel=fsdp2")
    history = run / "history.csv"
    deadline = time.monotonic() + 300
    while not history.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1.0)
    process.terminate()
    _, said = ended(process)
    assert "stopped by SIGTERM after step" in said
    kept = last_checkpoint(run)
    assert kept is not None and kept.sharded and 0 < kept.step < 4000
    assert json.loads((run / "results.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_killed_at_random_five_times(toy_file: Path, tmp_path: Path, parallel: str) -> None:
    """Either process of two, at any moment, five times: the last weights are an undisturbed run's, to the bit."""
    steps = ["train.steps=60", "train.save_every=2", "train.validate_every=20", f"train.parallel={parallel}"]
    process = start(TORCHRUN, toy_file, tmp_path / "whole", *steps)
    _, said = ended(process)
    assert process.returncode == 0, said
    draw = random.Random(5)
    run, kills = tmp_path / "killed", 0
    for training in (True, False, True, True, False):  # in the middle of its steps, or while it starts
        before = last_checkpoint(run)
        process = start(TORCHRUN, toy_file, run, *steps, "--resume")
        if training:
            wait_for_step(run, (before.step if before else 0) + 2 * draw.randint(1, 5), process)
            time.sleep(draw.uniform(0.0, 0.1))
        else:
            wait_for_workers(process)
            time.sleep(draw.uniform(0.0, 5.0))
        found = workers(process)
        assert found, process.communicate()[1]
        os.kill(draw.choice(sorted(found.values())), signal.SIGKILL)
        kills += 1
        ended(process)
        assert process.returncode != 0
    process = start(TORCHRUN, toy_file, run, *steps, "--resume")
    _, said = ended(process)
    assert process.returncode == 0, said
    print(f"{kills} kills")
    whole, again = last_weights(tmp_path / "whole"), last_weights(run)
    assert all(tensor.equal(again[name]) for name, tensor in whole.items())
    losses = [[row["valid_loss"] for row in read_history(path / "history.csv")] for path in (tmp_path / "whole", run)]
    assert losses[0] == losses[1]
