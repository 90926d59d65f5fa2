"""The table of all variants at one width: what each caches, holds and computes, next to MHA.

Every number comes from `AttentionSpec`; nothing is computed here but shares.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import UserError
from ..spec import AttentionSpec, preset
from ..variants import VARIANTS


@dataclass(frozen=True, kw_only=True)
class FamilyRow:
    """One variant: per layer, and per token (of one row) where it says so. Shares are of MHA at the same width.

    flops: operations for decoding one token, a multiply-add is 2; attention over `context` cached tokens.
    bytes_read_per_token: bytes of the cache read to decode one token at the end of `context` tokens.
    """

    variant: str
    also_called: str
    streams: tuple[str, ...]
    absorbed: bool
    cache_elements_per_token: int
    cache_bytes_per_token: int
    cache_share: float
    parameters: int
    parameters_share: float
    projection_flops_per_token: int
    attention_flops_per_token: int
    flops_share: float
    bytes_read_per_token: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """The table and what it was computed for. refused: variants that this width does not allow, with the reason."""

    d_model: int
    n_heads: int
    kv_heads: int | None
    position: str
    dtype: str
    context: int
    rows: tuple[FamilyRow, ...]
    refused: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def family(
    d_model: int,
    n_heads: int,
    *,
    kv_heads: int | None = None,
    position: str = "none",
    dtype: torch.dtype = torch.bfloat16,
    context: int = 4096,
) -> Family:
    """All variants at a width, in the order of the table VARIANTS.

    kv_heads: shared heads of the variants that share any.  dtype: of the cache.
    Raises UserError where MHA itself is impossible at this width.
    """
    if context < 0:
        raise UserError(f"context={context}: allowed are 0 or more tokens")
    baseline = preset("mha", d_model, n_heads, position=position)
    rows, refused = [], {}
    for name in VARIANTS:
        try:
            spec = preset(name, d_model, n_heads, kv_heads=kv_heads, position=position)
        except UserError as error:
            refused[name] = str(error)
            continue
        rows.append(_row(spec, baseline, dtype, context))
    return Family(
        d_model=d_model,
        n_heads=n_heads,
        kv_heads=kv_heads,
        position=baseline.position.kind,
        dtype=str(dtype).removeprefix("torch."),
        context=context,
        rows=tuple(rows),
        refused=refused,
    )


def _row(spec: AttentionSpec, baseline: AttentionSpec, dtype: torch.dtype, context: int) -> FamilyRow:
    def flops(of: AttentionSpec) -> int:
        return of.projection_flops_per_token + of.attention_flops_per_token(context)

    return FamilyRow(
        variant=spec.variant,
        also_called=spec.variant_class.also_called,
        streams=tuple(str(s) for s in spec.streams),
        absorbed=spec.can_absorb,
        cache_elements_per_token=spec.cache_elements_per_token,
        cache_bytes_per_token=spec.cache_bytes_per_token(dtype),
        cache_share=spec.cache_elements_per_token / baseline.cache_elements_per_token,
        parameters=spec.parameters,
        parameters_share=spec.parameters / baseline.parameters,
        projection_flops_per_token=spec.projection_flops_per_token,
        attention_flops_per_token=spec.attention_flops_per_token(context),
        flops_share=flops(spec) / flops(baseline),
        bytes_read_per_token=spec.bytes_read_per_token(context, dtype),
    )
