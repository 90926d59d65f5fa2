"""Schemes that add something to the embedding, and the scheme that does nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .base import Position


class NoPosition(Position):
    """No position information beyond the causal mask."""


class SinusoidalEmbedding(nn.Module):
    """Fixed sines and cosines of geometric wavelengths (arXiv 1706.03762, section 3.5)."""

    def __init__(self, d_model: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.d_model, self.base = d_model, base
        self._table = torch.empty(0)

    def forward(self, positions: Tensor) -> Tensor:
        """positions (B, T), padding -1 -> (B, T, E) float32; padding gets zeros."""
        needed = int(positions.max()) + 1
        if self._table.shape[0] < needed or self._table.device != positions.device:
            self._table = self._compute(max(2 * needed, 256), positions.device)
        out = self._table[positions.clamp(min=0)]
        return out * (positions >= 0)[..., None]

    def _compute(self, length: int, device: torch.device) -> Tensor:
        half = torch.arange(0, self.d_model, 2, device=device, dtype=torch.float32)
        frequency = torch.exp(-math.log(self.base) * half / self.d_model)
        angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
        return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, : self.d_model]


class Sinusoidal(Position):
    """Added to the embedding by the model; attention itself is without position."""

    absolute = True
    options: ClassVar[Mapping[str, Any]] = {"base": 10_000.0}

    @classmethod
    def embedding(cls, d_model: int, options: Mapping[str, Any]) -> nn.Module:
        return SinusoidalEmbedding(d_model, options["base"])


class LearnedEmbedding(nn.Module):
    """One trained vector per position, up to `max_length`; a later position is an error, not a wrap-around."""

    def __init__(self, d_model: int, max_length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_length, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, positions: Tensor) -> Tensor:
        """positions (B, T), padding -1 -> (B, T, E)."""
        longest = int(positions.max()) + 1
        if longest > self.weight.shape[0]:
            raise ValueError(f"position {longest - 1}: learned positions go up to {self.weight.shape[0] - 1}")
        return self.weight[positions.clamp(min=0)] * (positions >= 0)[..., None]


class Learned(Position):
    """Trained absolute positions, added to the embedding by the model."""

    absolute = True
    options: ClassVar[Mapping[str, Any]] = {"max_length": 1024}

    @classmethod
    def embedding(cls, d_model: int, options: Mapping[str, Any]) -> nn.Module:
        return LearnedEmbedding(d_model, options["max_length"])
