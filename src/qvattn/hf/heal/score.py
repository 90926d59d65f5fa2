"""How good a model is on fixed windows of text, and how much better than another one on the same windows.

Perplexity is exp of the mean cross-entropy over all tokens of a window but its first. Windows are the unit of the
intervals: two models are compared window by window, so that what a window is about cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...lab.statistics import estimate
from .objective import divergence
from .pair import DistilledPair
from .text import Windows, as_batches


@dataclass(frozen=True, kw_only=True)
class WindowScores:
    """Per window: mean cross-entropy of the student and of the teacher, and mean KL(teacher || student), in nats."""

    nll: list[float]
    teacher_nll: list[float]
    kl: list[float]
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        return {"nll": self.nll, "teacher_nll": self.teacher_nll, "kl": self.kl, "tokens": self.tokens}


def score_windows(pair: DistilledPair, windows: Windows) -> WindowScores:
    """Scores of both models as they are, in their own precision, one window at a time."""
    nll, teacher_nll, kl, tokens = [], [], [], 0
    student, teacher = pair.student, pair.teacher
    with torch.inference_mode():
        for batch in as_batches(windows, 1):
            ids, targets = batch["input_ids"], batch["labels"][:, 1:]
            hidden, other = (pair.run(model, ids)[0][:, :-1] for model in (student, teacher))
            own = divergence(hidden, student.output_weight, other, teacher.output_weight, targets)
            theirs = divergence(other, teacher.output_weight, other, teacher.output_weight, targets)
            count = int(own.tokens)
            nll.append(own.nll.item() / count)
            teacher_nll.append(theirs.nll.item() / count)
            kl.append(own.kl.item() / count)
            tokens += count
    return WindowScores(nll=nll, teacher_nll=teacher_nll, kl=kl, tokens=tokens)


def perplexity_of(nll: Sequence[float]) -> float:
    """exp of the mean over windows of equal length."""
    return math.exp(math.fsum(nll) / len(nll))


def loss_against(nll: Sequence[float], other: Sequence[float]) -> dict[str, float | None]:
    """How much higher the first perplexity is, in percent of the second, with a 95 % interval over windows.

    From the paired differences of log perplexity: `100 (exp(mean +- t s / sqrt(n)) - 1)`; a single window has no
    interval.
    """
    found = estimate([a - b for a, b in zip(nll, other, strict=True)])
    half = found.half_width

    def percent(difference: float) -> float:
        return 100 * math.expm1(difference)

    return {
        "percent": percent(found.mean),
        "low": None if half is None else percent(found.mean - half),
        "high": None if half is None else percent(found.mean + half),
    }


def summary(before: WindowScores, after: WindowScores) -> dict[str, Any]:
    """Perplexities of teacher, converted and healed model, their paired differences, and KL to the teacher."""
    kl = {"before": estimate(before.kl), "after": estimate(after.kl)}
    return {
        "windows": len(after.nll),
        "tokens": after.tokens,
        "teacher": perplexity_of(after.teacher_nll),
        "before": perplexity_of(before.nll),
        "after": perplexity_of(after.nll),
        "before_against_teacher": loss_against(before.nll, before.teacher_nll),
        "after_against_teacher": loss_against(after.nll, after.teacher_nll),
        "after_against_before": loss_against(after.nll, before.nll),
        "kl": {when: {"mean": found.mean, "half_width": found.half_width} for when, found in kl.items()},
    }
