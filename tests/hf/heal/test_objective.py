"""The chunked divergence and the hidden match against PyTorch's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qvattn.hf.heal import objective
from qvattn.hf.heal.objective import IGNORED, divergence, hidden_mismatch


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk", [7, 512])
def test_divergence_is_torchs(monkeypatch: pytest.MonkeyPatch, temperature: float, chunk: int) -> None:
    monkeypatch.setattr(objective, "CHUNK_TOKENS", chunk)
    hidden, output = draw(2, 20, 8, seed=1).requires_grad_(), draw(31, 8, seed=2).requires_grad_()
    teacher, teacher_output = draw(2, 20, 12, seed=3), draw(31, 12, seed=4)
    labels = torch.randint(0, 31, (2, 20), generator=torch.Generator().manual_seed(5))
    labels[:, -1] = IGNORED
    kept = labels != IGNORED
    logits, target = hidden[kept] @ output.T, teacher[kept] @ teacher_output.T
    expected = temperature**2 * F.kl_div(
        F.log_softmax(logits / temperature, -1),
        F.log_softmax(target / temperature, -1),
        log_target=True,
        reduction="sum",
    )
    found = divergence(hidden, output, teacher, teacher_output, labels, temperature)
    torch.testing.assert_close(found.kl, expected)
    torch.testing.assert_close(found.nll, F.cross_entropy(logits, labels[kept], reduction="sum").detach())
    assert found.tokens == kept.sum() and found.correct == (logits.argmax(-1) == labels[kept]).sum()
    ours = torch.autograd.grad(0.3 * found.kl, (hidden, output))
    theirs = torch.autograd.grad(0.3 * expected, (hidden, output))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_gradcheck() -> None:
    hidden, output = draw(1, 4, 3, seed=1).requires_grad_(), draw(5, 3, seed=2).requires_grad_()
    teacher, fixed, labels = draw(1, 4, 3, seed=3), draw(5, 3, seed=4), torch.tensor([[1, 2, 0, IGNORED]])
    assert torch.autograd.gradcheck(lambda h, w: divergence(h, w, teacher, fixed, labels).kl, (hidden, output))


def test_equal_distributions_have_no_divergence_and_no_gradient() -> None:
    hidden, output = draw(1, 6, 8, seed=1).requires_grad_(), draw(31, 8, seed=2)
    found = divergence(hidden, output, hidden.detach(), output, torch.zeros(1, 6, dtype=torch.long), 1.0)
    (gradient,) = torch.autograd.grad(found.kl, hidden)
    assert abs(found.kl.item()) < 1e-12
    assert gradient.abs().max() < 1e-12


def test_a_frozen_output_gets_no_gradient() -> None:
    hidden, output = draw(1, 6, 8, seed=1).requires_grad_(), draw(31, 8, seed=2)
    divergence(hidden, output, draw(1, 6, 8, seed=3), output, torch.zeros(1, 6, dtype=torch.long)).kl.backward()
    assert output.grad is None and hidden.grad is not None


def test_hidden_mismatch_does_not_see_scale_and_counts_every_token_the_same() -> None:
    x = draw(2, 5, 16, seed=1)
    assert hidden_mismatch([x, 3 * x], [x, x]).item() == pytest.approx(0.0, abs=1e-6)
    assert hidden_mismatch([x], [-x]).item() == pytest.approx(4.0, abs=1e-3)
    y = x.clone()
    y[0, 0] *= -1e4
    assert hidden_mismatch([y], [x]).item() == pytest.approx(4 / 10, abs=1e-3)
