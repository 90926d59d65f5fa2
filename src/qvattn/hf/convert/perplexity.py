"""Perplexity on fixed windows of text, kept window by window, so that two models compare by paired differences.

Each window stands alone: its first token is read and not predicted. Must never mix windows of different texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...lab.statistics import estimate
from ...models import CausalLM

Progress = Callable[[str, int, int], None]
"""What is being done, how much is done, of how much."""


def silent(what: str, done: int, total: int) -> None:
    """No progress."""


@dataclass(frozen=True, kw_only=True)
class WindowLosses:
    """Summed cross-entropy of each window, in nats, and the predicted tokens of a window."""

    sums: tuple[float, ...]
    per_window: int

    @property
    def tokens(self) -> int:
        """Predicted tokens."""
        return self.per_window * len(self.sums)

    @property
    def perplexity(self) -> float:
        return math.exp(math.fsum(self.sums) / self.tokens)

    def against(self, other: WindowLosses) -> Change:
        """Perplexity relative to another model's on the same windows."""
        if self.per_window != other.per_window or len(self.sums) != len(other.sums):
            raise UserError("perplexities compare on the same windows only")
        pairs = zip(self.sums, other.sums, strict=True)
        found = estimate([(mine - theirs) / self.per_window for mine, theirs in pairs])
        half = found.half_width
        return Change(
            percent=100 * math.expm1(found.mean),
            low=None if half is None else 100 * math.expm1(found.mean - half),
            high=None if half is None else 100 * math.expm1(found.mean + half),
        )


@dataclass(frozen=True, kw_only=True)
class Change:
    """Perplexity against another model's, in percent, with a 95 % interval from paired differences over windows.

    A single window has no interval.
    """

    percent: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" ({self.low:+.2f} to {self.high:+.2f})"
        return f"{self.percent:+.2f} %{interval}"


@torch.inference_mode()
def window_losses(
    model: CausalLM, windows: Tensor, *, progress: Progress = silent, what: str = "perplexity"
) -> WindowLosses:
    """windows: (N, T) token ids, T >= 2. One window at a time, in the model's precision; losses are summed in fp32.

    Raises UserError where a loss is not finite, naming the window.
    """
    sums = []
    for i, window in enumerate(windows):
        output: Any = model(input_ids=window[None], labels=window[None], reduction="sum", use_cache=False)
        loss = float(output.nll)
        if not math.isfinite(loss):
            raise UserError(f"the loss of window {i} is {loss}: the model gives no finite numbers for this text")
        sums.append(loss)
        progress(what, i + 1, len(windows))
    return WindowLosses(sums=tuple(sums), per_window=windows.shape[1] - 1)


def table_row(losses: WindowLosses, baseline: WindowLosses) -> dict[str, Any]:
    """Perplexity and its change, in JSON's types."""
    change = losses.against(baseline)
    return {"perplexity": losses.perplexity, "percent": change.percent, "low": change.low, "high": change.high}


def mean_loss(sums: Sequence[float], per_window: int) -> float:
    """Nats per token."""
    return math.fsum(sums) / (len(sums) * per_window)
