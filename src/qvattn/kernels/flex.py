"""PyTorch's FlexAttention: one fused kernel for scores that tables multiply or shift, on a device that compiles it.

On the CPU it runs uncompiled (slow, whole score matrix, forward only) and serves to test the request against the
reference. It never serves `value_mul`: FlexAttention has no factor between the softmax and the values.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..geometry import Geometry
from ..positions.base import DistanceTables
from .terms import ScoreTerm, ValueTerm, per_query_head


def flex_refuses(
    scores: Sequence[ScoreTerm], value: ValueTerm, tables: DistanceTables | None, dropout: float
) -> str | None:
    """Why FlexAttention cannot serve this request, or None."""
    if tables is not None and tables.value_mul is not None:
        return "values are multiplied by a table over distance"
    if dropout:
        return "it has no dropout on the weights"
    tensors = [value.stream, *(t for s in scores for t in (s.q, s.stream))]
    if value.stream.device.type == "cpu" and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "FlexAttention has no backward pass on the CPU"
    return None


def attend_flex(
    scores: Sequence[ScoreTerm],
    value: ValueTerm,
    geometry: Geometry,
    *,
    scale: float,
    tables: DistanceTables | None = None,
) -> Tensor:
    """As `attend_reference`, without weights. Several scoring terms are joined along the head width."""
    H = scores[0].q.shape[1]
    q = torch.cat([t.q for t in scores], dim=-1)
    k = torch.cat([per_query_head(t.keys(), H, t.groups) for t in scores], dim=-1)
    v = per_query_head(value.values(), H, value.groups)
    block_mask = None if geometry.visible is None else geometry.recall("flex block mask", lambda: _block_mask(geometry))
    out: Tensor = _flex(q.device.type)(
        q, k, v, score_mod=_score_mod(geometry, tables), block_mask=block_mask, scale=scale
    )
    # a query that sees nothing: FlexAttention gives zeros or NaN, depending on the device
    return out if geometry.seeing is None else out.masked_fill(~geometry.seeing, 0.0)


@functools.cache
def _flex(device: str) -> Callable[..., Any]:
    if device != "cpu":
        return torch.compile(flex_attention)

    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(*args, **kwargs)

    return uncompiled


def _block_mask(geometry: Geometry) -> BlockMask:
    visible = geometry.visible
    assert visible is not None
    M, T = geometry.q_pos.shape[1], geometry.k_pos.shape[1]
    mask = visible.expand(-1, -1, M, -1)[:, 0]

    def mask_mod(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return mask[b if mask.shape[0] > 1 else 0, m, n]

    return create_block_mask(mask_mod, mask.shape[0], None, M, T, device=str(mask.device))


def _score_mod(geometry: Geometry, tables: DistanceTables | None) -> Callable[..., Tensor] | None:
    if tables is None or (tables.mul is None and tables.add is None):
        return None
    q_pos, k_pos, low = geometry.q_pos, geometry.k_pos, tables.delta_min
    mul, add = tables.mul, tables.add
    some = mul if mul is not None else add
    assert some is not None
    last = some.shape[1] - 1
    many_q, many_k = q_pos.shape[0] > 1, k_pos.shape[0] > 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        delta = q_pos[b if many_q else 0, m] - k_pos[b if many_k else 0, n] - low
        delta = delta.clamp(0, last)  # padding lies outside of the table, and is masked
        if mul is not None:
            score = score * mul[h, delta]
        return score if add is None else score + add[h, delta]

    return score_mod
