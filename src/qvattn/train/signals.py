"""Turns SIGTERM and Ctrl-C into a request to stop after the current step. A second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
