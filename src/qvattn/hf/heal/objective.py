"""What healing minimises: the teacher's next-token distribution and its hidden states.

The projections to the vocabulary and the divergence are one function that works through the tokens in chunks: the
logits of a chunk, teacher's and student's, are made, turned into a gradient in place, and forgotten. It must never hold
a (tokens x vocabulary) matrix for more than `CHUNK_TOKENS` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...models.objective import IGNORED

CHUNK_TOKENS = 512
"""Tokens worked on at a time; with 49,152 words a chunk is 100 MB of fp32 logits for each of the two models."""


class Divergence(NamedTuple):
    """Sums over target tokens.

    kl: `tau^2 * KL(teacher || student)` of the distributions at temperature tau, in nats (differentiable).
    nll, correct: the student's own cross-entropy at temperature 1, and its argmax hits.
    """

    kl: Tensor
    nll: Tensor
    correct: Tensor
    tokens: Tensor


class _ProjectedDivergence(torch.autograd.Function):
    """sum_n tau^2 sum_v p_nv (log p_nv - log q_nv), p = softmax(t U^T / tau), q = softmax(h W^T / tau).

    (Hinton et al., arXiv 1503.02531; the factor tau^2 keeps the gradient's size when tau changes.) Its gradient by the
    student's logits is tau (q - p).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, output: Tensor, teacher: Tensor, teacher_output: Tensor, labels: Tensor, tau: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_output = torch.zeros_like(output, dtype=wide) if ctx.needs_input_grad[1] else None
        kl, nll = hidden.new_zeros((), dtype=wide), hidden.new_zeros((), dtype=wide)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        weight, teacher_weight = output.to(hidden.dtype), teacher_output.to(teacher.dtype)
        for at in range(0, len(hidden), CHUNK_TOKENS):
            here = slice(at, at + CHUNK_TOKENS)
            rows, target = hidden[here], labels[here, None]
            own = (rows @ weight.mT).to(wide)
            top, best = own.max(dim=-1, keepdim=True)
            correct += (best == target).sum()
            if tau != 1:
                nll += (own.logsumexp(dim=-1, keepdim=True) - own.gather(1, target)).sum()
                own, top = own.div_(tau), top / tau
            q = own.softmax(dim=-1)
            log_total = top - q.gather(1, best).log()
            if tau == 1:
                nll += (log_total - own.gather(1, target)).sum()
            other = (teacher[here] @ teacher_weight.mT).to(wide)
            other = other.div_(tau) if tau != 1 else other
            p = other.softmax(dim=-1)
            top, best = other.max(dim=-1, keepdim=True)
            # sum_v p_v (log p_v - log q_v), whose logarithms of sums come from the largest entries
            gain = log_total - (top - p.gather(1, best).log())
            kl += tau**2 * (gain + torch.linalg.vecdot(p, other.sub_(own))[:, None]).sum()
            if d_hidden is None and d_output is None:
                continue
            d_logits = q.sub_(p).mul_(tau).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[here] = d_logits @ weight
            if d_output is not None:
                d_output += (d_logits.mT @ rows).to(wide)
        ctx.save_for_backward(d_hidden, d_output)
        ctx.output_dtype = output.dtype
        ctx.mark_non_differentiable(nll, correct)
        return kl, nll, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        d_hidden, d_output = ctx.saved_tensors
        by_hidden = None if d_hidden is None else d_hidden * grad.to(d_hidden.dtype)
        by_output = None if d_output is None else (d_output * grad).to(ctx.output_dtype)
        return by_hidden, by_output, None, None, None, None


def divergence(
    hidden: Tensor,
    output: Tensor,
    teacher_hidden: Tensor,
    teacher_output: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
) -> Divergence:
    """How far the student's next-token distribution is from the teacher's, summed over the tokens that have a label.

    hidden (B, T, E) through output (V, E) against teacher_hidden (B, T, F) through teacher_output (V, F); labels (B, T)
    hold the next token, `IGNORED` where there is none. Gradients flow to `hidden` and `output` only.
    """
    kept = labels != IGNORED
    rows, teacher_rows, targets = hidden[kept], teacher_hidden[kept], labels[kept]
    if torch.is_autocast_enabled(rows.device.type):
        narrow = torch.get_autocast_dtype(rows.device.type)
        rows, teacher_rows = rows.to(narrow), teacher_rows.to(narrow)
    kl, nll, correct = _ProjectedDivergence.apply(
        rows, output, teacher_rows.detach(), teacher_output.detach(), targets, temperature
    )
    return Divergence(kl, nll.detach(), correct, torch.tensor(targets.numel(), device=labels.device))


def hidden_mismatch(student: Sequence[Tensor], teacher: Sequence[Tensor], eps: float = 1e-6) -> Tensor:
    """Mean squared difference of hidden states, each token's scaled to root mean square 1, averaged over layers.

    student, teacher: as many (B, T, E) tensors. 0 for equal directions, 2 for unrelated ones, 4 for opposite ones:
    whatever the size of a layer's states, and whatever single large token they hold, every token counts the same.
    """
    total = student[0].new_zeros((), dtype=torch.float32)
    for own, other in zip(student, teacher, strict=True):
        difference = _unit(own, eps) - _unit(other, eps)
        total = total + difference.square().mean()
    return total / len(student)


def _unit(x: Tensor, eps: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, wide.shape[-1:], eps=eps)


__all__ = ["CHUNK_TOKENS", "IGNORED", "Divergence", "divergence", "hidden_mismatch"]
