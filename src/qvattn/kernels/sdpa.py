"""PyTorch's fused attention, where it can express the request: no factor on scores or values, no weights returned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Geometry
from ..positions.base import DistanceTables
from .terms import ScoreTerm, ValueTerm, per_query_head


def sdpa_refuses(tables: DistanceTables | None, dropout: float) -> str | None:
    """Why SDPA cannot serve this request, or None."""
    if tables is not None and tables.mul is not None:
        return "scores are multiplied by a table over distance"
    if tables is not None and tables.value_mul is not None:
        return "values are multiplied by a table over distance"
    if dropout:
        return "its dropout would draw other random numbers than the reference, and unpair comparisons"
    return None


def attend_sdpa(
    scores: Sequence[ScoreTerm],
    value: ValueTerm,
    geometry: Geometry,
    *,
    scale: float,
    tables: DistanceTables | None = None,
) -> Tensor:
    """As `attend_reference`, without weights. Several scoring terms are joined along the head width."""
    H = scores[0].q.shape[1]
    q = scores[0].q if len(scores) == 1 else torch.cat([t.q for t in scores], dim=-1)
    keys = [per_query_head(t.keys(), H, t.groups) for t in scores]
    k = keys[0] if len(keys) == 1 else torch.cat(keys, dim=-1)
    v = per_query_head(value.values(), H, value.groups)
    k, v = k.to(q.dtype), v.to(q.dtype)  # int8 streams come as float32, whatever the model's type
    bias = None if tables is None or tables.add is None else geometry.spread(tables.add, tables.delta_min)
    if bias is None and geometry.is_plain_causal:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    mask, seeing = geometry.visible, geometry.seeing
    if mask is not None and seeing is not None:
        mask = mask | ~seeing  # a query that sees nothing would divide 0 by 0; it is zeroed below
    if bias is not None:
        bias = bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    if mask is not None:
        mask = mask.expand(q.shape[0], -1, q.shape[2], -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out if seeing is None else out * seeing
