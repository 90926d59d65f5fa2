"""What a conversion did: per layer what was left, the cache before and after, perplexity before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from ...models import CausalLM
from .perplexity import WindowLosses


class LayerRow(BaseModel):
    """One layer. residuals: share of the centred energy of keys and values that the new ones leave."""

    model_config = ConfigDict(frozen=True)

    layer: int
    variant: str
    streams: list[str]
    elements: int
    elements_before: int
    key_residual: float
    value_residual: float
    effect: dict[int, float] | None = None
    """Measured loss, in nats a token, of this layer alone at some widths (with a measured budget)."""


class Conversion(BaseModel):
    """The report, as it is written to conversion.json."""

    model_config = ConfigDict(frozen=True)

    source: str
    variant: str
    options: dict[str, Any]
    calibration: dict[str, Any]
    heldout: dict[str, Any] | None
    layers: list[LayerRow]
    cache_dtype: str
    cache_bytes_per_token: int
    cache_bytes_per_token_before: int
    perplexity: float | None
    perplexity_before: float | None
    change_percent: float | None
    change_low: float | None
    change_high: float | None
    window_losses: list[float] | None
    window_losses_before: list[float] | None
    seconds: float
    environment: dict[str, Any]
    notes: list[str]

    @property
    def cache_share(self) -> float:
        """Cache after the conversion, as a share of the cache before."""
        return self.cache_bytes_per_token / self.cache_bytes_per_token_before


def cache_bytes(model: CausalLM) -> int:
    """Bytes cached per token over all layers, in the model's dtype."""
    return model.cache_elements_per_token() * model.dtype.itemsize


def perplexity_fields(before: WindowLosses | None, after: WindowLosses | None) -> dict[str, Any]:
    """The fields of `Conversion` about perplexity, None where no held-out text was given."""
    names = ("perplexity", "perplexity_before", "change_percent", "change_low", "change_high")
    if before is None or after is None:
        return dict.fromkeys((*names, "window_losses", "window_losses_before"))
    change = after.against(before)
    values = (after.perplexity, before.perplexity, change.percent, change.low, change.high)
    losses = {"window_losses": list(after.sums), "window_losses_before": list(before.sums)}
    return dict(zip(names, values, strict=True)) | losses


def worst(layers: Sequence[LayerRow]) -> LayerRow:
    """The layer whose keys are met least well."""
    return max(layers, key=lambda row: row.key_residual)
