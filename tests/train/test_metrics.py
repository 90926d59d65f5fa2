"""Metrics against logits whose answers are worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qvattn.models import token_objective
from qvattn.train.metrics import TokenSums, count_tokens, perplexity, scores_from_sums

LN = math.log

# Two sentences over four tokens. Softmax of log-probabilities gives the probabilities back, so every cross-entropy is
# -ln p(label). Rows: p = (1/2, 1/4, 1/8, 1/8) label 0 (hit, ln 2); the same with label 2 (miss, ln 8); padding;
# p = (1/10, 1/5, 3/10, 2/5) label 3 (hit, ln 2.5); the same with label 1 (miss, ln 5); the same, label 3 (hit, ln 2.5).
HALVES, TENTHS = [1 / 2, 1 / 4, 1 / 8, 1 / 8], [1 / 10, 1 / 5, 3 / 10, 2 / 5]
LOGITS = torch.tensor([[HALVES, HALVES, HALVES], [TENTHS, TENTHS, TENTHS]]).log() + torch.tensor([[[1.0]], [[-7.0]]])
LABELS = torch.tensor([[0, 2, -100], [3, 1, 3]])
NLL = LN(2) + LN(8) + LN(2.5) + LN(5) + LN(2.5)


def test_hand_computed_logits() -> None:
    nll, correct, tokens = count_tokens(LOGITS, LABELS)
    assert nll == pytest.approx(NLL, rel=1e-6)
    assert (correct, tokens) == (3, 5)
    scores = scores_from_sums(nll, correct, tokens)
    assert scores.accuracy == pytest.approx(0.6)
    assert scores.loss == pytest.approx(NLL / 5, rel=1e-6)
    assert scores.perplexity == pytest.approx((2 * 8 * 2.5 * 5 * 2.5) ** (1 / 5), rel=1e-6)


def test_average_is_over_tokens_not_over_batches() -> None:
    """Sentence one has 2 tokens and 1 hit, sentence two 3 and 2: 3/5, and not the mean of 1/2 and 2/3."""
    parts = [count_tokens(LOGITS[i : i + 1], LABELS[i : i + 1]) for i in range(2)]
    assert [part[1:] for part in parts] == [(1, 2), (2, 3)]
    total = scores_from_sums(*(sum(column) for column in zip(*parts, strict=True)))
    assert total.accuracy == pytest.approx(0.6)
    assert total.loss == pytest.approx(NLL / 5, rel=1e-6)


def test_models_objective_agrees() -> None:
    """The sums that models return (logits made by a projection) are those of the hand-computed logits."""
    hidden, output = torch.eye(6).view(2, 3, 6), LOGITS.view(6, 4).mT.contiguous()
    smoothed = token_objective(hidden, output, LABELS, 0.1)
    assert smoothed.nll.item() == pytest.approx(NLL, rel=1e-5)
    assert (int(smoothed.correct), int(smoothed.tokens)) == (3, 5)
    assert smoothed.loss.item() > smoothed.nll.item()
    sums = TokenSums()
    sums.add(smoothed)
    sums.add(smoothed)
    assert sums.scores().loss == pytest.approx(NLL / 5, rel=1e-5)
    assert sums.scores().tokens == 10


def test_extremes() -> None:
    assert perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))
    assert scores_from_sums(0.0, 2, 2).perplexity == 1.0
    with pytest.raises(ValueError, match="no target tokens"):
        scores_from_sums(0.0, 0, 0)


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 9), st.integers(9, 20)), min_size=1, max_size=30))
def test_sums_do_not_depend_on_the_cut(parts: list[tuple[float, int, int]]) -> None:
    class Counts:
        def __init__(self, nll: float, correct: int, tokens: int) -> None:
            self.nll, self.correct, self.tokens = (torch.tensor(x) for x in (nll, correct, tokens))

    sums = TokenSums()
    for part in parts:
        sums.add(Counts(*part))
    tokens = sum(part[2] for part in parts)
    assert sums.scores().tokens == tokens
    assert sums.scores().accuracy == pytest.approx(sum(part[1] for part in parts) / tokens)
    assert sums.scores().loss == pytest.approx(sum(part[0] for part in parts) / tokens, rel=1e-5, abs=1e-7)
