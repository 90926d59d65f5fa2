"""Turns SIGTERM and Ctrl-C into a request to stop after the current step. A second Ctrl-C stops at once.

A run that a comparison started also stops so when the comparison is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


PARENT_VARIABLE = "QVATTN_PARENT"
"""Environment variable: the process that started this one and that it must not outlive."""
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """Ask the system for a SIGTERM when the process named by QVATTN_PARENT ends (Linux; elsewhere nothing).

    Only a direct child follows: what a run starts itself inherits the variable, but not the parent.
    """
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent.isdigit() or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        if not os.path.exists(f"/proc/{parent}"):  # it ended before we asked
            os.kill(os.getpid(), signal.SIGTERM)


class StopRequest:
    """While entered, `name` is None until one of the signals arrives, then its name."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
