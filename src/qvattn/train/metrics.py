"""Token accuracy, cross-entropy and perplexity: micro-averages over target tokens, from the unsmoothed loss.

Every sum is divided once, at the end: averaging per-batch averages would weigh short batches too much.
Token accuracy is teacher-forced, over non-padding target tokens with the end-of-sentence included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED = -100
"""The label of a position that is not scored (padding)."""


class TokenCounts(Protocol):
    """What a model's output must carry: detached scalars, sums over the batch's target tokens."""

    nll: Tensor
    correct: Tensor
    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Micro-averages over `tokens` target tokens. `loss` is in nats per token, `accuracy` a fraction."""

    accuracy: float
    loss: float
    perplexity: float
    tokens: int

    def as_dict(self) -> dict[str, float | int]:
        return {
            "accuracy": self.accuracy,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "tokens": self.tokens,
        }


class TokenSums:
    """Running sums (nll, correct, tokens) kept on the device in double precision, so that adding never waits for it."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, output: TokenCounts) -> None:
        """Add one batch's sums."""
        self.sums += torch.stack(
            [output.nll.double(), output.correct.double(), output.tokens.to(output.nll.device).double()]
        )

    def scores(self) -> Scores:
        """The averages so far. Raises `ValueError` when no token was counted."""
        return scores_from_sums(*self.sums.tolist())


def scores_from_sums(nll: float, correct: float, tokens: float) -> Scores:
    """Micro-averages from sums. Perplexity is `exp(loss)`, infinite where that overflows."""
    if tokens <= 0:
        raise ValueError("metrics: no target tokens were counted")
    loss = nll / tokens
    return Scores(accuracy=correct / tokens, loss=loss, perplexity=perplexity(loss), tokens=int(tokens))


def perplexity(loss: float) -> float:
    """`exp(loss)`, infinite where that overflows, NaN for NaN."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def count_tokens(logits: Tensor, labels: Tensor) -> tuple[float, int, int]:
    """(summed unsmoothed cross-entropy, correct predictions, target tokens).

    logits: (..., V), labels: (...) with -100 where a position is not scored. Ties go to the lowest token id.
    """
    flat, targets = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    kept = targets != IGNORED
    nll = cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    correct = (flat.argmax(-1) == targets)[kept].sum()
    return nll.item(), int(correct), int(kept.sum())
