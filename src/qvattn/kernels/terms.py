"""What a kernel is given: scoring terms, one value term, and a scale. Data only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..positions.base import Rotation


def head_map(n_heads: int, shared: int, groups: tuple[int, ...] | None) -> list[int]:
    """For each query head the shared head it reads: i // (H/g), or as the group sizes say."""
    sizes = groups or (n_heads // shared,) * shared
    return [g for g, size in enumerate(sizes) for _ in range(size)]


@dataclass(frozen=True, kw_only=True)
class ScoreTerm:
    """Adds q_h(m) . view(stream)[head(h)](n) to the score of every query head.

    q: (B, H, M, D).  stream: (B, G, T, W), read from element `start` for D elements; as in `ValueTerm` a tensor, or a
        `QuantisedStream`, which has its shape and is indexed alike.
    groups: query heads per shared head, None for even groups.
    gain: (D,) multiplies the stream on read, before the rotation.  rotation: turns the stream on read.
    """

    q: Tensor
    stream: Tensor
    start: int = 0
    groups: tuple[int, ...] | None = None
    gain: Tensor | None = None
    rotation: Rotation | None = None

    def keys(self) -> Tensor:
        """The view (B, G, T, D) with gain and rotation applied."""
        k = self.stream[..., self.start : self.start + self.q.shape[-1]]
        if self.gain is not None:
            k = k * self.gain
        return k if self.rotation is None else self.rotation(k)


@dataclass(frozen=True, kw_only=True)
class ValueTerm:
    """What is summed with the attention weights.

    stream: (B, G, T, W), read from `start` for `width` elements (None: to the end).
    flat: every query head sums all G heads, giving G * width elements.
    lift: (H, D_in, D_out) maps each head's sum afterwards (MLA's value up-projection, slim's fixed matrix).
    """

    stream: Tensor
    start: int = 0
    width: int | None = None
    groups: tuple[int, ...] | None = None
    flat: bool = False
    lift: Tensor | None = None

    def values(self) -> Tensor:
        """The view (B, G, T, width); flat: (B, 1, T, G * width)."""
        stop = None if self.width is None else self.start + self.width
        v = self.stream[..., self.start : stop]
        return v.transpose(1, 2).flatten(2)[:, None] if self.flat else v


def per_query_head(x: Tensor, n_heads: int, groups: tuple[int, ...] | None) -> Tensor:
    """(B, G, T, W) -> (B, H, T, W): each query head beside the shared head it reads."""
    shared = x.shape[1]
    if shared == n_heads:
        return x
    if shared == 1:
        return x.expand(-1, n_heads, -1, -1)
    index = torch.tensor(head_map(n_heads, shared, groups), device=x.device)
    return x.index_select(1, index)
