"""The specification of attention over streams: short, obviously right, differentiable everywhere.

Every other kernel is tested against this one. It works in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Geometry
from ..positions.base import DistanceTables
from .terms import ScoreTerm, ValueTerm, per_query_head


def attend_reference(
    scores: Sequence[ScoreTerm],
    value: ValueTerm,
    geometry: Geometry,
    *,
    scale: float,
    tables: DistanceTables | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, M, Dv) in the dtype of the queries and the weights after the softmax (B, H, M, T).

    s = mul(delta) * scale * sum_terms(q . k) + add(delta);  a = softmax over visible keys;  o = sum a value_mul v.
    A query that sees nothing gives zeros, with zero gradients.
    """
    q = scores[0].q
    H, wide = q.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32
    products = [(t.q.to(wide) * scale) @ per_query_head(t.keys().to(wide), H, t.groups).mT for t in scores]
    s = functools.reduce(torch.add, products)
    if tables is not None and tables.mul is not None:
        s = s * geometry.spread(tables.mul.to(wide), tables.delta_min)
    if tables is not None and tables.add is not None:
        s = s + geometry.spread(tables.add.to(wide), tables.delta_min)
    if geometry.hidden is not None:
        s = s.masked_fill(geometry.hidden, torch.finfo(wide).min)
    a = torch.softmax(s, dim=-1)
    if geometry.seeing is not None:
        a = a * geometry.seeing
    w = F.dropout(a, dropout) if dropout else a
    if tables is not None and tables.value_mul is not None:
        w = w * geometry.spread(tables.value_mul.to(wide), tables.delta_min)
    v = per_query_head(value.values().to(wide), H, value.groups)
    return (w @ v).to(q.dtype), a
