"""Streams in int8 with one float32 scale per token and shared head: quantised on append, read by the kernels.

    scale = max |x| / 127,   data = round(x / scale),   |data * scale - x| <= scale / 2 = max |x| / 254

where the maximum is over the W elements of one token and head. (Rounding in float32 adds a relative 2^-22 or so.)
This module knows nothing of attention: a `QuantisedStream` stands where a stream tensor stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEVELS = 127


@dataclass(frozen=True)
class QuantisedStream:
    """A stream (B, G, T, W) as `data` int8 (B, G, T, W) and `scale` float32 (B, G, T).

    Indexing dequantises, so a kernel that knows nothing of it (the reference, SDPA) reads `stream[..., a:b]` as usual.
    """

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8

    @property
    def device(self) -> torch.device:
        return self.data.device

    def dequantise(self) -> Tensor:
        """float32 (B, G, T, W)."""
        return self.data.to(torch.float32) * self.scale[..., None]

    def __getitem__(self, index: Any) -> Tensor:
        return self.dequantise()[index]


def quantise(x: Tensor) -> QuantisedStream:
    """x (B, G, T, W) with one scale per token and head. Elements that are all zero get scale 0."""
    wide = x.detach().to(torch.float32)
    scale = wide.abs().amax(dim=-1) / LEVELS
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    data = (wide * inverse[..., None]).round().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return QuantisedStream(data, scale)


def dense(stream: Tensor | QuantisedStream) -> Tensor:
    """The stream as a plain tensor."""
    return stream.dequantise() if isinstance(stream, QuantisedStream) else stream


def all_dense(streams: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every stream as a plain tensor, for those who compute with streams themselves."""
    return {name: dense(stream) for name, stream in streams.items()}
