"""Perplexity on fixed windows of text, kept window by window, so that two models compare by paired differences.

Each window stands alone: its first token is read and not predicted. Must never mix windows of different texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...lab.statistics import Change, perplexity_change
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
        mine, theirs = ([loss / one.per_window for loss in one.sums] for one in (self, other))
        return perplexity_change(mine, theirs)


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
