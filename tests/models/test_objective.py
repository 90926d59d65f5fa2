"""The projected loss against torch's own, against numbers worked out by hand, and against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from qvattn.models import objective as module
from qvattn.models import token_objective


def test_by_hand() -> None:
    """Two tokens, three words; logits are the hidden states themselves."""
    hidden = torch.tensor([[[0.0, math.log(2.0), 0.0], [math.log(3.0), 0.0, 0.0], [9.0, 9.0, 9.0]]])
    labels = torch.tensor([[1, 2, -100]])
    # token 1: p = (1/4, 2/4, 1/4), right; token 2: p = (3/5, 1/5, 1/5), wrong
    out = token_objective(hidden, torch.eye(3), labels)
    assert out.tokens == 2 and out.correct == 1
    assert out.nll.item() == pytest.approx(math.log(2) + math.log(5), rel=1e-6)
    assert out.loss.item() == pytest.approx(out.nll.item(), rel=1e-6)
    smooth = token_objective(hidden, torch.eye(3), labels, smoothing=0.3)
    mean_1 = (2 * math.log(4) + math.log(2)) / 3
    mean_2 = (math.log(5 / 3) + 2 * math.log(5)) / 3
    expected = 0.7 * (math.log(2) + math.log(5)) + 0.3 * (mean_1 + mean_2)
    assert smooth.loss.item() == pytest.approx(expected, rel=1e-6)
    assert smooth.nll.item() == pytest.approx(out.nll.item(), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 20),
    vocabulary=st.integers(2, 30),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    chunk=st.integers(1, 25),
    seed=st.integers(0, 1000),
)
def test_equals_torch_in_value_and_gradient(
    rows: int, vocabulary: int, smoothing: float, chunk: int, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(1, rows, 6, dtype=torch.float64, requires_grad=True)
    output = torch.randn(vocabulary, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, rows))
    labels[0, rows // 2 :: 3] = -100
    kept = labels[0] != -100
    before = module.CHUNK_TOKENS
    module.CHUNK_TOKENS = chunk
    try:
        ours = token_objective(hidden, output, labels, smoothing)
    finally:
        module.CHUNK_TOKENS = before
    logits = hidden[0][kept] @ output.mT
    theirs = F.cross_entropy(logits, labels[0][kept], reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(ours.loss, theirs)
    assert int(ours.correct) == int((logits.argmax(-1) == labels[0][kept]).sum())
    assert int(ours.tokens) == int(kept.sum())
    for mine, other in zip(
        torch.autograd.grad(3 * ours.loss, (hidden, output), allow_unused=True),
        torch.autograd.grad(3 * theirs, (hidden, output), allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_gradient_against_finite_differences() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    output = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, 4, -100, 0]])
    assert torch.autograd.gradcheck(lambda h, o: token_objective(h, o, labels, 0.2).loss, (hidden, output))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, output = torch.randn(2, 40, 16), torch.randn(300, 16) / 4
    labels = torch.randint(0, 300, (2, 40))
    grads, losses = [], []
    for kind in (torch.float32, dtype):
        h = hidden.to(kind).requires_grad_()
        out = token_objective(h, output, labels, 0.1)
        losses.append(out.loss.item())
        grads.append(torch.autograd.grad(out.loss, h)[0].float())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert (grads[0] - grads[1]).norm() / grads[0].norm() < 2e-2


def test_no_gradient_is_made_when_none_is_wanted() -> None:
    with torch.no_grad():
        out = token_objective(torch.randn(1, 3, 4), torch.randn(7, 4), torch.tensor([[1, 2, 3]]), 0.1)
    assert not out.loss.requires_grad and out.loss > 0
