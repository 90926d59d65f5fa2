"""A training run on two processes that is killed again and again, beside one that nobody disturbs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from qvattn.train.checkpoint import find_checkpoint, last_checkpoint, whole_checkpoint

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "qvattn.cli"]
PATIENCE = 3000.0


def descendants(process: int) -> list[int]:
    """All processes that come from this one, as they are now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [process]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        return subprocess.Popen([*LAUNCH, *arguments], stdout=file, stderr=file, env=environment)


def kill(process: subprocess.Popen[bytes], *, worker: int | None) -> None:
    """SIGKILL to one worker (the launcher must then end the job by itself), or to everything (None)."""
    family = descendants(process.pid)
    for victim in [process.pid, *family] if worker is None else family[worker : worker + 1]:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue
    assert process.wait(timeout=PATIENCE) != 0
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{victim}/fd").exists() and alive(victim) for victim in family):
        assert time.monotonic() < deadline, "a process outlived its job"
        time.sleep(0.05)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def killed_run(
    arguments: list[str],
    run_dir: Path,
    log: Path,
    *,
    kills: int,
    steps: int,
    pause: float,
    draw: random.Random,
    say: Callable[[str], None],
) -> list[str]:
    """Start the run, kill it at `kills` random moments, start it again each time, and let it end; what was hit when.

    pause: the most seconds that a kill comes after the checkpoint it waited for; less than the last steps take.
    """
    moments = sorted(draw.uniform(0, 0.9 * steps) for _ in range(kills))
    hit = []
    for moment in moments:
        process = start(arguments, log)
        wait_until(process, run_dir, moment, log)
        time.sleep(draw.uniform(0, pause))
        worker = draw.choice([None, 0, 1])
        kill(process, worker=worker)
        checkpoint, damaged = whole_checkpoint(run_dir)
        assert damaged == []
        reached = checkpoint.step if checkpoint else 0
        hit.append(f"{'both processes' if worker is None else 'one process'} after step {reached}")
        say(f"killed: {hit[-1]}")
    process = start(arguments, log)
    assert process.wait(timeout=PATIENCE) == 0, log.read_text()[-4000:]
    return hit


def wait_until(process: subprocess.Popen[bytes], run_dir: Path, step: float, log: Path) -> None:
    """Until the run has a checkpoint of this step or a later one."""
    deadline = time.monotonic() + PATIENCE
    while (found := last_checkpoint(run_dir)) is None or found.step < step:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, "hung"
        time.sleep(0.02)
        if step < 1 and descendants(process.pid):
            return


def same_weights(left: Path, right: Path) -> int:
    """The number of tensors, all of which are equal bit for bit."""
    one, other = (load_file(find_checkpoint(run, "last") / "model.safetensors") for run in (left, right))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    return len(one)
