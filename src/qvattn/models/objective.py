"""The training objective over tokens, with the unsmoothed loss and the accuracy that validation reports.

The output projection and the loss are one function that works through the tokens in chunks: the logits of a chunk are
made, turned into their gradient in place, and forgotten, so that no (tokens x vocabulary) matrix is ever kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Label of a token that is not a target (the convention of torch and Hugging Face)."""

CHUNK_TOKENS = 512
"""Tokens worked on at a time: few enough that their logits stay in cache with a small vocabulary, enough that adding up
the gradient of the output matrix does not dominate with a large one."""

HALF_SCALE = 1024.0
"""float16 gradients of logits are scaled by this on the way through the product, to keep small ones from vanishing."""


class Objective(NamedTuple):
    """Sums over target tokens: smoothed loss (differentiable), unsmoothed loss, argmax hits, and their number."""

    loss: Tensor
    nll: Tensor
    correct: Tensor
    tokens: Tensor


class _ProjectedLoss(torch.autograd.Function):
    """sum_n (1 - e) nll_n + e mean_v(-log p_nv): label smoothing (arXiv 1512.00567, section 7) of hidden @ output^T."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, output: Tensor, labels: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        V = output.shape[0]
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_output = torch.zeros_like(output, dtype=wide) if wanted else None
        nll, spread = hidden.new_zeros((), dtype=wide), hidden.new_zeros((), dtype=wide)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        weight = output.to(hidden.dtype)
        for rows, target, at in _chunks(hidden, labels, CHUNK_TOKENS):
            logits = (rows @ weight.mT).to(wide)
            top, best = logits.max(dim=-1, keepdim=True)
            chosen = logits.gather(1, target)
            mean = logits.mean(dim=-1, keepdim=True) if smoothing else None
            p = logits.sub_(top).exp_()
            total = p.sum(dim=-1, keepdim=True)
            lse = total.log() + top
            nll += (lse - chosen).sum()
            correct += (best == target).sum()
            if mean is not None:
                spread += (lse - mean).sum()
            if d_hidden is None or d_output is None:
                continue
            p.div_(total)
            if smoothing:
                p.sub_(smoothing / V)
            p.scatter_add_(1, target, torch.full_like(lse, smoothing - 1))
            scale = HALF_SCALE if hidden.dtype == torch.float16 else 1.0
            d_logits = p.mul_(scale).to(hidden.dtype) if scale != 1 else p.to(hidden.dtype)
            d_hidden[at : at + len(rows)] = (d_logits @ weight) / scale if scale != 1 else d_logits @ weight
            if hidden.dtype == wide:
                d_output.addmm_(d_logits.mT, rows)
            else:
                d_output += (d_logits.mT @ rows).to(wide) / scale
        ctx.save_for_backward(d_hidden, d_output)
        ctx.output_dtype = output.dtype
        ctx.mark_non_differentiable(nll, correct)
        return (1 - smoothing) * nll + smoothing * spread, nll, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_output = ctx.saved_tensors
        return d_hidden * grad.to(d_hidden.dtype), (d_output * grad).to(ctx.output_dtype), None, None


def _chunks(hidden: Tensor, labels: Tensor, size: int) -> list[tuple[Tensor, Tensor, int]]:
    return [(hidden[i : i + size], labels[i : i + size, None], i) for i in range(0, len(hidden), size)]


def token_objective(hidden: Tensor, output: Tensor, labels: Tensor, smoothing: float = 0.0) -> Objective:
    """Objective of predicting `labels` (B, T), IGNORED at padding, from hidden (B, T, E) through `output` (V, E)."""
    kept = labels != IGNORED
    rows, targets = hidden[kept], labels[kept]
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    loss, nll, correct = _ProjectedLoss.apply(rows, output, targets, smoothing)
    return Objective(loss, nll.detach(), correct, torch.tensor(targets.numel(), device=labels.device))
