"""What a layer computes linearly from its input, as matrices, and second moments of that input.

Keys, values and queries before any norm or rotation are affine in the normed input y of a layer: K = [y; 1] A. With the
second moments C = E[w [y; 1] [y; 1]^T] every least squares problem over calibration text is one over matrices:
E[w |K - [y; 1] B|^2] = tr (A - B)^T C (A - B). All of this is float64: the problems are small, and badly scaled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...spec import AttentionSpec
from ...variants.separate_keys import MHA

RIDGE = 1e-9
"""Of the mean diagonal, added to what is inverted."""
SMALLEST = 1e-6
"""Directions in which errors count less than this share of the most important one count as much as that."""


def affine(linear: nn.Linear) -> Tensor:
    """(E + 1, out) float64: [y; 1] times it is what the layer gives for y."""
    bias = linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
    return torch.cat((linear.weight.detach().T, bias.detach()[None])).double()


@dataclass(frozen=True, kw_only=True)
class Maps:
    """Queries, keys and values of one attention layer as maps of [y; 1], heads side by side: (E + 1, heads * D)."""

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, variant: MHA) -> Maps:
        with torch.no_grad():
            return cls(spec=variant.spec, q=affine(variant.q_proj), k=affine(variant.k_proj), v=affine(variant.v_proj))

    @property
    def k_heads(self) -> int:
        return self.k.shape[1] // self.d_key

    @property
    def v_heads(self) -> int:
        return self.v.shape[1] // self.d_value

    @property
    def d_key(self) -> int:
        return self.spec.d_key or self.spec.d_head

    @property
    def d_value(self) -> int:
        return self.spec.d_value or self.spec.d_head

    def one(self) -> Tensor:
        """(E + 1, 1): the constant 1 as a map."""
        unit = torch.zeros(len(self.k), 1, dtype=self.k.dtype)
        unit[-1] = 1
        return unit


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Weighted second moments of [y; 1] over calibration tokens, and how much an error counts in each direction.

    second: (E + 1, E + 1) float64.  key_metric: (n, n), n all elements of the keys; metric: (m, m), m those of keys and
    values together. An error e of a key counts e^T key_metric e.
    """

    second: Tensor
    key_metric: Tensor
    metric: Tensor

    def of(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        """E[a^T b] of two maps."""
        return a.T @ self.second @ (a if b is None else b)

    def energy(self, a: Tensor) -> float:
        """E|a|^2 of a map, summed over tokens."""
        return float((a * (self.second @ a)).sum())

    def centred(self, a: Tensor) -> Tensor:
        """The map without its mean over tokens."""
        centre = a.clone()
        centre[-1] -= (self.second[-1] @ a) / self.second[-1, -1]
        return centre


def roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """M^1/2 and M^-1/2 of a symmetric positive matrix."""
    values, vectors = torch.linalg.eigh((metric + metric.T) / 2)
    root = values.clamp_min(values[-1] * SMALLEST).sqrt()
    return vectors * root @ vectors.T, vectors / root @ vectors.T


def regress(moments: Moments, features: Tensor, target: Tensor) -> Tensor:
    """X minimising E|target - features X|^2, for maps (E + 1, n) and (E + 1, m) -> (n, m)."""
    gram = moments.of(features)
    if not len(gram):
        return target.new_zeros(0, target.shape[1])
    # columns to unit size first, so that the ridge means the same for all
    size = gram.diagonal().clamp_min(1e-30).rsqrt()
    scaled = size[:, None] * gram * size + RIDGE * torch.eye(len(gram), dtype=gram.dtype)
    solved: Tensor = torch.linalg.solve(scaled, size[:, None] * moments.of(features, target))
    return size[:, None] * solved


def principal(second: Tensor, rank: int) -> Tensor:
    """The `rank` leading eigenvectors of a symmetric matrix (n, n), as columns, largest first."""
    _, vectors = torch.linalg.eigh((second + second.T) / 2)
    return vectors.flip(1)[:, :rank]


def joined(maps: Iterable[Tensor]) -> Tensor:
    return torch.cat(tuple(maps), dim=1)
