"""Learning-rate schedules as pure functions of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math

from .recipe import TrainSpec


def learning_rate(spec: TrainSpec, step: int) -> float:
    """The learning rate of optimiser step `step` (the first is 1).

    Linear warm-up to the peak at `warmup_steps`, then `peak * sqrt(warmup / step)` (inverse-sqrt, the schedule of
    "Attention Is All You Need"), half a cosine down to `final_learning_rate` at `steps`, or constant.
    """
    warmup = max(spec.warmup_steps, 1)
    peak = spec.learning_rate
    if step < warmup:
        return peak * step / warmup
    if spec.schedule == "inverse-sqrt":
        return peak * math.sqrt(warmup / step)
    if spec.schedule == "constant":
        return peak
    done = min((step - warmup) / max(spec.steps - warmup, 1), 1.0)
    return spec.final_learning_rate + (peak - spec.final_learning_rate) * (1 + math.cos(math.pi * done)) / 2
