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
from torch import Tensor

from ...lab.statistics import estimate, perplexity_change
from ...models.objective import token_objective
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


class Scorer:
    """Scores a student against its teacher on fixed windows; what the teacher makes of them is computed once."""

    def __init__(self, pair: DistilledPair, windows: Windows) -> None:
        self.pair, self.batches = pair, as_batches(windows, 1)
        self._teacher: list[tuple[Tensor, float]] = []

    @torch.inference_mode()
    def score(self) -> WindowScores:
        """Scores of the student as it is, one window at a time, in the models' own precision."""
        student, teacher = self.pair.student, self.pair.teacher
        nll, kl, tokens = [], [], 0
        for number, batch in enumerate(self.batches):
            ids, targets = batch["input_ids"], batch["labels"][:, 1:]
            if number == len(self._teacher):
                states = self.pair.run(teacher, ids)[0][:, :-1]
                loss = token_objective(states, teacher.output_weight, targets).nll.item()
                self._teacher.append((states, loss / targets.numel()))
            hidden = self.pair.run(student, ids)[0][:, :-1]
            theirs = self._teacher[number][0]
            found = divergence(hidden, student.output_weight, theirs, teacher.output_weight, targets)
            count = int(found.tokens)
            nll.append(found.nll.item() / count)
            kl.append(found.kl.item() / count)
            tokens += count
        return WindowScores(nll=nll, teacher_nll=[loss for _, loss in self._teacher], kl=kl, tokens=tokens)


def perplexity_of(nll: Sequence[float]) -> float:
    """exp of the mean over windows of equal length."""
    return math.exp(math.fsum(nll) / len(nll))


def summary(before: WindowScores, after: WindowScores) -> dict[str, Any]:
    """Perplexities of teacher, converted and healed model, their paired differences, and KL to the teacher."""
    kl = {"before": estimate(before.kl), "after": estimate(after.kl)}
    return {
        "windows": len(after.nll),
        "tokens": after.tokens,
        "teacher": perplexity_of(after.teacher_nll),
        "before": perplexity_of(before.nll),
        "after": perplexity_of(after.nll),
        "before_against_teacher": vars(perplexity_change(before.nll, before.teacher_nll)),
        "after_against_teacher": vars(perplexity_change(after.nll, after.teacher_nll)),
        "after_against_before": vars(perplexity_change(after.nll, before.nll)),
        "kl": {when: {"mean": found.mean, "half_width": found.half_width} for when, found in kl.items()},
    }
