"""Rotation on read with the very cosines and sines that the model made when a token came in.

They are kept per token, once for all layers, so every kind of RoPE (scaled, dynamic, partial, proportional) is exact:
nothing is derived again from a config.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...positions import Rotation

NAME = "turns"
"""The stream that the first rotating layer keeps beside its own: [cos, sin] of one half, (B, 1, T, 2 * pairs)."""


class KeptRotation(Rotation):
    """Turns stream elements in "half" pairs by kept tables. turns: (B, 1, T, 2 * pairs)."""

    def __init__(self, turns: Tensor) -> None:
        pairs = turns.shape[-1] // 2
        super().__init__(turns.new_empty(0), dim=2 * pairs)
        wide = turns[:, 0].to(torch.float64 if turns.dtype == torch.float64 else torch.float32)
        self._kept = wide[..., :pairs], wide[..., pairs:]

    def tables(self, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        cos, sin = self._kept
        return cos.to(dtype), sin.to(dtype)


def turns_of(cos: Tensor, sin: Tensor, rows: int) -> Tensor:
    """What to keep of a model's cos and sin (B or 1, M, 2 * pairs), whose second half repeats the first."""
    pairs = cos.shape[-1] // 2
    return torch.cat((cos[..., :pairs], sin[..., :pairs]), dim=-1)[:, None].expand(rows, -1, -1, -1)
