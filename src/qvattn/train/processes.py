"""The processes of one training job: what they add up, agree on and wait for, and what is said when one is lost.

Numbers that enter training go through the job's own backend; agreements and waiting go over the CPU, so that they never
drain a GPU's queue. With one process everything here does nothing. It must never let one process wait for ever for
another that has died: every exchange has a limit, except where the main one works alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

PATIENCE = timedelta(hours=24)
"""How long the others wait while the main process works alone: it encodes a corpus, translates, writes a checkpoint."""

SIGNS_OF_LOSS = ("connection closed", "connection reset", "timed out", "timeout", "broken pipe", "socket", "nccl")
"""What the backends say when another process is gone or silent."""


class LostProcessError(RuntimeError):
    """Another process of the job has died or fallen silent; the checkpoints written before are intact."""


class ElsewhereError(RuntimeError):
    """Another process has failed and says so itself; this one only has to end."""


class Processes:
    """The processes of a job. `timeout`: seconds that one waits for the others in an exchange."""

    def __init__(self, accelerator: Accelerator, timeout: float = 600.0) -> None:
        self._accelerator = accelerator
        self.count: int = accelerator.num_processes
        self.index: int = accelerator.process_index
        self._control: Any = None
        self._patient: Any = None
        if self.count > 1:
            self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._patient = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def is_main(self) -> bool:
        return self.index == 0

    @property
    def patient_group(self) -> Any:
        """The CPU process group for work that may take long (None with one process)."""
        return self._patient

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, on each of them."""
        if self.count == 1:
            return values
        total: Tensor = self._accelerator.reduce(values, reduction="sum")
        return total

    def any(self, mine: bool) -> bool:
        """Whether it holds on any process."""
        if self.count == 1:
            return mine
        flag = torch.tensor([float(mine)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._control)
        return bool(flag.item() > 0)

    def wait(self) -> None:
        """Until all processes are here, however long the main one works."""
        if self.count > 1:
            dist.barrier(group=self._patient)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by index, on each of them. Plain values of this job's own processes only."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._patient)
        return values

    def check(self, error: Exception | None) -> None:
        """Raise on every process when one has failed: its own error there, `ElsewhereError` on the others."""
        told = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for index, message in enumerate(told):
            if message is not None:
                raise ElsewhereError(f"process {index} failed: {message}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all processes go through at their own pace: none goes on before all have ended it well."""
        error: Exception | None = None
        try:
            yield
        except Exception as problem:
            error = problem
        self.check(error)

    @contextmanager
    def contact(self) -> Iterator[None]:
        """Within it, an exchange that fails because another process is gone raises `LostProcessError`, in words."""
        try:
            yield
        except RuntimeError as error:
            text = " ".join(str(error).split())
            of_a_backend = type(error) is RuntimeError or isinstance(error, dist.DistError)
            if self.count == 1 or not of_a_backend or not any(sign in text.lower() for sign in SIGNS_OF_LOSS):
                raise
            raise LostProcessError(
                f"process {self.index} of {self.count} lost contact with another one, which has died or is silent "
                f"(look for its own message, or for an exit code of -9: killed, often for lack of memory). "
                f"What was saved is intact: start the job again with --resume. The backend says: {text[:200]}"
            ) from error
