"""Real processes to kill, and what a killed one had been doing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORKER = Path(__file__).with_name("forker.py")
PATIENCE = 400.0
"""Seconds after which a process counts as hung; the machine may be busy."""


class Forker:
    """Starts command lines of `qvattn` as processes of their own, without the seconds of importing."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(FORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the forker has ended"
        return json.loads(line)

    def _ask(self, **job: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def start(self, arguments: list[str], log: Path) -> int:
        """The number of the process; what it prints is added to `log`."""
        return int(self._ask(start=arguments, log=str(log)))

    def poll(self, child: int) -> int | None:
        code: int | None = self._ask(poll=child)
        return code

    def run(self, arguments: list[str], log: Path) -> int:
        """The exit code of a command line."""
        return int(self._ask(wait=self.start(arguments, log)))

    def kill(self, child: int) -> int:
        """SIGKILL to the process and all that share its session; its exit code, which is not -9 if it was too late."""
        os.killpg(child, signal.SIGKILL)
        return int(self._ask(wait=child))

    def wait_until(self, child: int, moment: Callable[[], bool]) -> int | None:
        """None once `moment` is there, or the exit code if the process ends before."""
        deadline = time.monotonic() + PATIENCE
        while not moment():
            code = self.poll(child)
            if code is not None:
                return code
            assert time.monotonic() < deadline, "hung"
            time.sleep(0.0005)
        return None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=PATIENCE)


def phase(run_dir: Path) -> str:
    """What the files of a killed run tell about the moment."""
    if not (run_dir / "recipe.yaml").exists():
        return "before the run directory was set up"
    drafts = list((run_dir / "checkpoints").glob(".draft-*"))
    if any(any(draft.iterdir()) for draft in drafts if draft.is_dir()):
        return "while a checkpoint was written or deleted"
    if drafts or any(path.name.endswith(".draft") for path in run_dir.iterdir()):
        return "while a file was written"
    if (run_dir / "results.json").exists():
        return "after the results were written"
    if not list((run_dir / "checkpoints").glob("step-*")):
        return "before the first checkpoint"
    return "training, between checkpoints"
