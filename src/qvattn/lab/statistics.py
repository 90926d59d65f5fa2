"""Means over seeds (or windows of text) with Student-t intervals, and differences paired by them.

Must never invent an interval: one seed has none, and the callers say so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from scipy.special import stdtrit

CONFIDENCE = 0.95


class Estimate(BaseModel):
    """A mean over seeds; `half_width` is half of its two-sided 95 % t-interval, None where it has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float
    half_width: float | None
    count: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval exists and does not hold zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t such that a Student-t variable with `degrees` of freedom lies in [-t, t] with `confidence`."""
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, not {degrees}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    return float(stdtrit(degrees, 0.5 + confidence / 2.0))


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Mean and t-interval of independent `values` (one per seed): mean +- t(n-1) * s / sqrt(n).

    Raises:
        ValueError: no values.
    """
    count = len(values)
    if count == 0:
        raise ValueError("an estimate needs at least one value")
    mean = math.fsum(values) / count
    if count == 1 or not all(math.isfinite(value) for value in values):
        return Estimate(mean=mean, half_width=None, count=count)
    deviation = statistics.stdev(values)
    half_width = t_quantile(count - 1, confidence) * deviation / math.sqrt(count)
    return Estimate(mean=mean, half_width=half_width, count=count)


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = CONFIDENCE
) -> Estimate | None:
    """Mean and t-interval of `values[seed] - baseline[seed]` over the seeds both have; None if they share none."""
    shared = sorted(values.keys() & baseline.keys())
    if not shared:
        return None
    return estimate([values[seed] - baseline[seed] for seed in shared], confidence)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Perplexity against another model's on the same windows, in percent, with a 95 % interval over windows.

    A single window has no interval.
    """

    percent: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" ({self.low:+.2f} to {self.high:+.2f})"
        return f"{self.percent:+.2f} %{interval}"


def perplexity_change(losses: Sequence[float], other: Sequence[float]) -> Change:
    """How much higher the first perplexity is, from the mean losses (nats per token) of each window under both models.

    From the paired differences: `100 (exp(mean +- t s / sqrt(n)) - 1)`.
    """
    found = estimate([mine - theirs for mine, theirs in zip(losses, other, strict=True)])
    half = found.half_width
    return Change(
        percent=100 * math.expm1(found.mean),
        low=None if half is None else 100 * math.expm1(found.mean - half),
        high=None if half is None else 100 * math.expm1(found.mean + half),
    )
