"""Widths per layer under a total budget, spent where the measured effect on the loss is largest.

Every layer is converted alone, at a few widths, and the loss of the whole model is measured on some calibration
windows; all other layers are as they were. Between measured widths the loss is interpolated; then width goes, a step at
a time, to the layer where the next step saves most. That effects of layers add up is an assumption, not checked here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...errors import UserError
from ...models import CausalLM
from ...spec import AttentionSpec
from .layers import HiddenStates, fitted
from .perplexity import Progress
from .weighing import Weighing

MEASURED = (0.5, 1.0, 1.75)
"""Widths that are measured, as multiples of the mean width."""
STEPS = 8
"""The mean width is this many steps."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Loss of the model, in nats a token, with one layer at each measured width, minus that of the original."""

    widths: tuple[int, ...]
    losses: tuple[float, ...]

    def at(self, width: int) -> float:
        """Interpolated in log(width); beyond the measured widths the nearest piece goes on, but never rises."""
        points = [(math.log(w), max(loss, 0.0)) for w, loss in zip(self.widths, self.losses, strict=True)]
        falling = [points[0]]
        for x, y in points[1:]:
            falling.append((x, min(y, falling[-1][1])))
        x = math.log(width)
        pieces = list(pairwise(falling))
        low, high = next((piece for piece in pieces if x <= piece[1][0]), pieces[-1])
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return max(0.0, low[1] + slope * (x - low[0]))


def measured_widths(mean: int, largest: int) -> tuple[int, ...]:
    return tuple(sorted({min(largest, max(1, round(mean * factor))) for factor in MEASURED}))


@torch.no_grad()
def measure(
    model: CausalLM,
    specs: Sequence[AttentionSpec],
    windows: Tensor,
    weighings: Sequence[Weighing],
    *,
    scored: int,
    progress: Progress,
) -> list[Effect]:
    """The effect of every layer alone. windows: (N, T), moments come from all of them, losses from the first `scored`.

    specs: of the layers after conversion, at the mean width. Costs about layers x widths x scored / 2 forward passes.
    """
    hidden = HiddenStates(model, windows)
    blocks = list(model.decoder_stack.blocks())
    effects: list[Effect] = []
    baseline = None
    labels = windows[:scored, 1:]
    for i, (block, spec) in enumerate(zip(blocks, specs, strict=True)):
        moments = hidden.moments(block, weighings[i])
        if baseline is None:
            baseline = _loss(model, hidden, blocks, 0, labels)
        mean = _width(spec)
        widths, losses = measured_widths(mean, _largest(spec)), []
        original = block.self_attn
        for width in widths:
            block.self_attn = fitted(block, spec.replace(d_ctx=width), moments)[0]
            losses.append(_loss(model, hidden, blocks, i, labels) - baseline)
            block.self_attn = original
        effects.append(Effect(widths=widths, losses=tuple(losses)))
        hidden.advance(block)
        progress("measuring layers alone", i + 1, len(blocks))
    return effects


def _loss(model: CausalLM, hidden: HiddenStates, blocks: Sequence[object], start: int, labels: Tensor) -> float:
    """Mean loss of the scored windows, from layer `start` on."""
    states = list(hidden.states[: len(labels)])
    for block in blocks[start:]:
        states = list(hidden.through(block, states))  # type: ignore[arg-type]
    total = 0.0
    for x, target in zip(states, labels, strict=True):
        logits = model.logits(model.decoder_stack.last_norm(x)[0, :-1]).float()
        total += float(torch.nn.functional.cross_entropy(logits, target))
    return total / len(labels)


def _width(spec: AttentionSpec) -> int:
    if spec.d_ctx is None:
        raise UserError(f"--spend measured: {spec.variant!r} has no width per layer; allowed are qv-ka and its kin")
    return spec.d_ctx


def _largest(spec: AttentionSpec) -> int:
    return (spec.k_heads or spec.n_heads) * spec.d_head - 1


def spend(effects: Sequence[Effect], specs: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """The specs with widths that sum to the same total, spent greedily a step at a time."""
    mean = _width(specs[0])
    step = max(1, mean // STEPS)
    total = sum(_width(spec) for spec in specs)
    widths = [step] * len(specs)
    caps = [_largest(spec) for spec in specs]
    while sum(widths) + step <= total:
        gains = [
            effect.at(w) - effect.at(w + step) if w + step <= cap else -math.inf
            for effect, w, cap in zip(effects, widths, caps, strict=True)
        ]
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] == -math.inf:
            break
        if gains[best] <= 0:  # nothing more to gain anywhere measured: the rest is spread evenly
            best = min((i for i in range(len(widths)) if gains[i] > -math.inf), key=widths.__getitem__)
        widths[best] += step
    return [spec.replace(d_ctx=width) for spec, width in zip(specs, widths, strict=True)]
