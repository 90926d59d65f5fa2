"""Transformers' attention masks as Geometry. Positions are read off the mask alone, since the mask is what counts.

Padding, chunks and single steps become positions, which every kernel takes. Any other pattern (packed sequences,
two-sided image tokens) stays a mask, which only SDPA and the reference take. Additive masks that are more than
"seen or not" are refused.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...geometry import Geometry


class MaskedGeometry(Geometry):
    """A pattern that positions do not express: visible (B, 1, M, T) bool as given."""

    def __init__(self, visible: Tensor) -> None:
        _, _, M, T = visible.shape
        q_pos, k_pos = torch.arange(M, device=visible.device), torch.arange(T, device=visible.device)
        super().__init__(q_pos[None], k_pos[None], causal=False)
        self._given = visible

    @cached_property
    def visible(self) -> Tensor | None:
        return self._given

    @cached_property
    def is_plain_causal(self) -> bool:
        return False

    @property
    def impl(self) -> str:
        return "sdpa"


def kernel_for(geometry: Geometry) -> str:
    """The `impl` of `attend` that a geometry allows."""
    return geometry.impl if isinstance(geometry, MaskedGeometry) else "auto"


def past_geometry(cache: Any, mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Geometry:
    """Geometry of M queries at the end of T keys; made once for all layers of a step (remembered on the cache)."""
    known = getattr(cache, "_qvattn_geometry", None)
    if known is not None and known[0] is mask and known[1] == (queries, keys):
        remembered: Geometry = known[2]
        return remembered
    geometry = _from_mask(mask, queries, keys, device)
    cache._qvattn_geometry = (mask, (queries, keys), geometry)
    return geometry


def _from_mask(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Geometry:
    k_pos = torch.arange(keys, dtype=torch.int32, device=device)[None]
    q_pos = k_pos[:, keys - queries :]
    if mask is None:
        if queries not in (1, keys):
            raise UserError(
                f"attention_mask=None with {queries} queries over {keys} keys: which keys they see is unsaid"
            )
        return Geometry(q_pos, k_pos, causal=True)
    visible = seen(mask, keys)
    real = visible[:, 0, -1]
    geometry = Geometry(q_pos.expand(real.shape[0], -1), k_pos.masked_fill(~real, -1), causal=True)
    if queries > 1:
        causal = k_pos[:, None, :] <= q_pos[:, :, None]
        if not torch.equal(visible[:, 0], real[:, None] & causal):
            return MaskedGeometry(visible)
    return geometry


def seen(mask: Tensor, keys: int) -> Tensor:
    """A mask of transformers, boolean or additive, as (B, 1, M, T) bool: True where a query sees a key.

    Raises UserError for masks that differ by head, and for additive masks that hold more than zeros and minus infinity.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(f"attention_mask has shape {shape}, expected [B, 1, M, T], the same for all heads")
    mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise UserError("attention_mask adds finite values to the scores; lean caches take masks of 0 and -inf only")
    return visible
