"""Factors per head: applied to tokens without copying them, and products of them that inference may keep.

(`tokens @ factors` with a batch would first copy the factors once per row of the batch.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.terms import per_query_head


def per_head(x: Tensor, factor: Tensor, groups: tuple[int, ...] | None = None) -> Tensor:
    """x (B, H, T, D) times the factor (G, D, W) of the shared head that each query head reads -> (B, H, T, W)."""
    if groups is not None:
        factor = per_query_head(factor[None], x.shape[1], groups)[0]
    if factor.shape[0] == x.shape[1]:
        return torch.einsum("bhtd,hdw->bhtw", x, factor)
    grouped = x.unflatten(1, (factor.shape[0], -1))
    return torch.einsum("bgntd,gdw->bgntw", grouped, factor).flatten(1, 2)


def for_all_heads(x: Tensor, factor: Tensor) -> Tensor:
    """One stream for all heads, x (B, 1, T, R), times each head's factor (H, R, W) -> (B, H, T, W)."""
    rows = x[:, 0] @ factor.transpose(0, 1).flatten(1)
    return rows.unflatten(-1, (factor.shape[0], -1)).transpose(1, 2)


class Folded:
    """One remembered product of parameters: made once, made again when a parameter has changed.

    Not where gradients are recorded: there a product is part of the graph and is made anew.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._value: Tensor = torch.empty(0)

    def recall(self, parameters: Sequence[Tensor], make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives for the parameters as they are now.

        Writes through `Tensor.data` escape PyTorch's version counter and are not noticed.
        """
        if torch.is_grad_enabled():
            return make()
        versions = [None if p.is_inference() else p._version for p in parameters]
        key = [(p.data_ptr(), v, p.dtype, p.device) for p, v in zip(parameters, versions, strict=True)]
        if self._key != key:
            self._key, self._value = key, make()
        return self._value
