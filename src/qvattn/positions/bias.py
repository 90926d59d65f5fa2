"""Schemes that add a bias to the score: ALiBi, T5 buckets, KERPLE.

    s_h(m, n) = q.k * scale + add_h(m - n)

ALiBi (arXiv 2108.12409) is fixed, T5 (1910.10683) learns one bias per bucket of distances, KERPLE (2205.09921, its
logarithmic kernel) learns two positive numbers per head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .agf import inverse_softplus
from .base import Position, wide_dtype


def alibi_slopes(n_heads: int) -> list[float]:
    """The published slopes: 2^(-8i/H) for a power of two, otherwise those of the next smaller power of two, followed
    by every other slope of the next larger one."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return slopes + between[: n_heads - power]


class ALiBi(Position):
    """add = -slope_h |delta|, with fixed slopes. Symmetric where attention is bidirectional."""

    def __init__(self, n_heads: int, causal: bool, options: Mapping[str, Any]) -> None:
        super().__init__(n_heads, causal, options)
        # not a buffer: half-precision models would round the slopes of head counts that are no power of two
        self.slopes = alibi_slopes(n_heads)

    def compute(self, delta: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        slopes = torch.tensor(self.slopes, device=delta.device)
        return None, -slopes[:, None] * delta.abs(), None


def t5_bucket(delta: Tensor, *, causal: bool, buckets: int, max_distance: int) -> Tensor:
    """The bucket of every distance delta = m - n, as in T5: exact for near tokens, logarithmic up to `max_distance`.

    Bidirectional: the upper half of the buckets is for keys after the query.
    """
    if causal:
        first, distance = torch.zeros_like(delta), delta.clamp(min=0)
    else:
        buckets //= 2
        first, distance = (delta < 0).long() * buckets, delta.abs()
    exact = buckets // 2
    # float32 in T5's own order of operations: the borders between buckets are its own
    ratio = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


class T5(Position):
    """add = one learned number per head and bucket of distances. buckets, max_distance: see `t5_bucket`."""

    options: ClassVar[Mapping[str, Any]] = {"buckets": 32, "max_distance": 128}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> str | None:
        if options["buckets"] % 2:
            return f"position.buckets={options['buckets']}: two directions share them; give an even number"
        if options["max_distance"] <= options["buckets"] // 2:
            return (
                f"position.max_distance={options['max_distance']}: half of buckets={options['buckets']} are exact "
                f"distances; give more than {options['buckets'] // 2}"
            )
        return None

    def __init__(self, n_heads: int, causal: bool, options: Mapping[str, Any]) -> None:
        super().__init__(n_heads, causal, options)
        self.buckets, self.max_distance = options["buckets"], options["max_distance"]
        self.bias = nn.Parameter(torch.empty(n_heads, self.buckets))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Nearly no bias at first; a little noise tells the buckets apart."""
        nn.init.normal_(self.bias, std=0.02)

    def compute(self, delta: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        bucket = t5_bucket(delta, causal=self.causal, buckets=self.buckets, max_distance=self.max_distance)
        return None, self.bias[:, bucket], None


class Kerple(Position):
    """add = -r1_h log(1 + r2_h |delta|), r1, r2 > 0; each direction of bidirectional attention has its own.

    r1 at initialisation: geometric over the heads from 0.25 to 4, from flat to steep; r2 = 1.
    """

    raw_r1: Tensor
    raw_r2: Tensor

    def __init__(self, n_heads: int, causal: bool, options: Mapping[str, Any]) -> None:
        super().__init__(n_heads, causal, options)
        sides = 1 if causal else 2
        self.raw_r1 = nn.Parameter(torch.empty(sides, n_heads))
        self.raw_r2 = nn.Parameter(torch.empty(sides, n_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r1 = torch.logspace(-2, 2, self.n_heads, base=2) if self.n_heads > 1 else torch.ones(1)
        with torch.no_grad():
            self.raw_r1.copy_(inverse_softplus(r1))
            self.raw_r2.copy_(inverse_softplus(torch.tensor(1.0)))

    @property
    def coefficients(self) -> tuple[Tensor, Tensor]:
        """r1 and r2, each (1 or 2, H): for past keys, and for future keys where attention is bidirectional."""
        wide = wide_dtype(self.raw_r1.dtype)
        tiny = torch.finfo(torch.float32).tiny  # softplus underflows to 0
        r1, r2 = (F.softplus(raw.to(wide)).clamp(min=tiny) for raw in (self.raw_r1, self.raw_r2))
        return r1, r2

    def compute(self, delta: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        r1, r2 = (r[:, :, None] for r in self.coefficients)
        bias = -r1 * torch.log1p(r2 * delta.abs())
        return None, bias[0] if bias.shape[0] == 1 else torch.where(delta >= 0, bias[0], bias[1]), None
