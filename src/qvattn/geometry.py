"""Geometry: who sees whom and how far apart, from integer positions alone.

Attention receives positions, never lengths: `q_pos (B, M)`, `k_pos (B, T)`, padding is -1. A key is visible iff
`k_pos >= 0` and (not causal or `k_pos <= q_pos`) and (no window or `q_pos - k_pos < window`; without causality the
window is two-sided, `|q_pos - k_pos| < window`). Left padding, chunked prefill, rollback and beams follow without
special cases. A model builds one Geometry per forward pass and hands it to all its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

T_ = TypeVar("T_")


class Geometry:
    """Visibility and distances of one attention call.

    q_pos: (B, M) or (1, M) integers.  k_pos: (B, T) or (1, T) integers, -1 marks padding.
    causal, window: see the module head.
    """

    def __init__(self, q_pos: Tensor, k_pos: Tensor, *, causal: bool, window: int | None = None) -> None:
        self.q_pos, self.k_pos, self.causal = q_pos, k_pos, causal
        # beyond any distance of 32-bit positions: no window, and no number that they could not be compared with
        self.window = None if window is not None and window > torch.iinfo(torch.int32).max else window
        self._recalled: dict[Hashable, Any] = {}

    def with_window(self, window: int | None) -> Geometry:
        """The same tokens seen through another window; made once for all layers that have it."""
        if window == self.window:
            return self
        return self.recall(("window", window), lambda: self._windowed(window))

    def _windowed(self, window: int | None) -> Geometry:
        return Geometry(self.q_pos, self.k_pos, causal=self.causal, window=window)

    def recall(self, key: Hashable, make: Callable[[], T_]) -> T_:
        """What `make` gives, made once for all layers that share this geometry."""
        if key not in self._recalled:
            self._recalled[key] = make()
        value: T_ = self._recalled[key]
        return value

    @classmethod
    def contiguous(
        cls, length: int, *, causal: bool, window: int | None = None, device: torch.device | str = "cpu"
    ) -> Geometry:
        """A sequence of `length` tokens without padding that attends to itself."""
        positions = torch.arange(length, dtype=torch.int32, device=device)[None]
        return cls(positions, positions, causal=causal, window=window)

    @cached_property
    def delta(self) -> Tensor:
        """Distances q_pos - k_pos, (B, M, T) int32; meaningless where the key or the query is padding."""
        return self.q_pos[:, :, None] - self.k_pos[:, None, :]

    @cached_property
    def visible(self) -> Tensor | None:
        """(B, 1, M or 1, T) bool, or None when every query sees every key."""
        mask = (self.k_pos >= 0)[:, None, None, :]
        if self.causal:
            mask = mask & (self.delta >= 0)[:, None]
        if self.window is not None:
            near = self.delta if self.causal else self.delta.abs()
            mask = mask & (near < self.window)[:, None]
        return None if bool(mask.all()) else mask

    @cached_property
    def seeing(self) -> Tensor | None:
        """(B, 1, M or 1, 1) bool: queries that see at least one key; None when all do."""
        if self.visible is None:
            return None
        seeing = self.visible.any(dim=-1, keepdim=True)
        return None if bool(seeing.all()) else seeing

    @cached_property
    def hidden(self) -> Tensor | None:
        """The complement of `visible`, or None."""
        return None if self.visible is None else ~self.visible

    @cached_property
    def is_plain_causal(self) -> bool:
        """Whether the mask is exactly the lower triangle of a square without padding."""
        m, t = self.q_pos.shape[1], self.k_pos.shape[1]
        return (
            self.causal
            and self.window is None
            and m == t
            and self.offset == 0
            and bool((self.k_pos >= 0).all())
            and bool((self.q_pos >= 0).all())
        )

    @cached_property
    def offset(self) -> int | None:
        """The constant c with `delta[b, m, n] == m - n + c` for all real tokens, or None if there is none."""
        m, t = self.q_pos.shape[1], self.k_pos.shape[1]
        device = self.k_pos.device
        q = self.q_pos - torch.arange(m, dtype=self.q_pos.dtype, device=device)
        k = self.k_pos - torch.arange(t, dtype=self.k_pos.dtype, device=device)
        q_real, k_real = self.q_pos >= 0, self.k_pos >= 0
        if not bool(q_real.any()) or not bool(k_real.any()):
            return 0
        low = torch.iinfo(torch.int32).min
        q_high, k_high = q.masked_fill(~q_real, low).amax(1), k.masked_fill(~k_real, low).amax(1)
        q_low, k_low = -(-q).masked_fill(~q_real, low).amax(1), -(-k).masked_fill(~k_real, low).amax(1)
        rows = q_real.any(1) & k_real.any(1)
        shift, shift_low = (q_high - k_low)[rows], (q_low - k_high)[rows]
        if shift.numel() == 0:
            return 0
        first = int(shift[0])
        return first if bool(((shift == first) & (shift_low == first)).all()) else None

    @cached_property
    def delta_range(self) -> tuple[int, int]:
        """The smallest and largest distance a table must cover, both included."""
        m, t = self.q_pos.shape[1], self.k_pos.shape[1]
        if self.offset is not None:
            return self.offset - (t - 1), self.offset + m - 1
        largest = int(self.q_pos.max())
        return (0 if self.causal else -int(self.k_pos.max())), max(largest, 0)

    def spread(self, table: Tensor, delta_min: int) -> Tensor:
        """A table over distances (H, N), first entry at `delta_min`, laid out as (1 or B, H, M, T)."""
        m, t = self.q_pos.shape[1], self.k_pos.shape[1]
        if self.offset is None:
            index = (self.delta - delta_min).clamp_(0, table.shape[1] - 1)
            return table[:, index].transpose(0, 1)
        # Toeplitz: row m is a window of the reversed table, one entry further left than row m - 1.
        last = table.shape[1] - 1 - (m - 1 + self.offset - delta_min)
        windows = table.flip(-1).unfold(-1, t, 1)[:, last : last + m]
        return windows.flip(1)[None]
