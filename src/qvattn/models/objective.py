"""The training objective over tokens, with the unsmoothed loss and the accuracy that validation reports.

One pass over the logits forward and one backward; logits are made for real target tokens only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""Label of a token that is not a target (the convention of torch and Hugging Face)."""


class Objective(NamedTuple):
    """Sums over target tokens: smoothed loss (differentiable), unsmoothed loss, argmax hits, and their number."""

    loss: Tensor
    nll: Tensor
    correct: Tensor
    tokens: Tensor


class _SmoothedLoss(torch.autograd.Function):
    """sum_n (1 - e) nll_n + e mean_v(-log p_nv): label smoothing (arXiv 1512.00567, eq. 10) in two passes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        top, best = wide.max(dim=-1, keepdim=True)
        lse = (wide - top).exp_().sum(dim=-1, keepdim=True).log_() + top
        nll = (lse - wide.gather(1, labels[:, None])).sum()
        loss = nll
        if smoothing:
            loss = (1 - smoothing) * nll + smoothing * (lse.sum() - wide.mean(dim=-1).sum())
        correct = (best[:, 0] == labels).sum()
        ctx.save_for_backward(logits, labels, lse)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(nll, correct)
        return loss.clone() if loss is nll else loss, nll, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, lse = ctx.saved_tensors
        smoothing = ctx.smoothing
        p = torch.exp(logits - lse)
        if smoothing:
            p -= smoothing / logits.shape[1]
        p.scatter_add_(1, labels[:, None], torch.full_like(lse, smoothing - 1, dtype=p.dtype))
        return (p * grad).to(logits.dtype), None, None


def token_objective(hidden: Tensor, output: Tensor, labels: Tensor, smoothing: float = 0.0) -> Objective:
    """Objective of predicting `labels` (B, T), IGNORED at padding, from hidden (B, T, E) through `output` (V, E)."""
    kept = labels != IGNORED
    rows, targets = hidden[kept], labels[kept]
    logits = rows @ output.to(rows.dtype).mT
    loss, nll, correct = _SmoothedLoss.apply(logits, targets, smoothing)
    return Objective(loss, nll.detach(), correct, torch.tensor(targets.numel(), device=labels.device))
