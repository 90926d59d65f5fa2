"""Sampling: temperature, top-k and top-p as transformers applies them, from a generator of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import UserError
from ..models import QvattnModel
from .choice import largest
from .greedy import Choose, run_session
from .session import LeanModel, as_lean


@torch.inference_mode()
def sample(
    model: QvattnModel | LeanModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    copies: int = 1,
    eos_token_id: int | Sequence[int] | None = None,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Random continuations of sources (B, S), or of prompts padded on the left.

    temperature: divides the logits; 0 takes the most likely token.  top_k: only the k most likely tokens.  top_p: only
    the smallest set of most likely tokens whose probabilities reach p.  seed: the same seed gives the same tokens.
    copies: continuations of each source.  on_tokens: sees the tokens (B * copies,) of every step.
    Returns (B * copies, L) ids as `greedy` does. Raises UserError for values out of range.
    """
    if copies < 1:
        raise UserError(f"copies={copies}: allowed is 1 or more")
    choose = chooser(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    session = as_lean(model).open(input_ids, attention_mask, copies=copies)
    return run_session(
        session, input_ids, choose, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, on_tokens=on_tokens
    )


def chooser(*, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0) -> Choose:
    """The function that draws tokens (rows,) from logits (rows, V)."""
    if temperature < 0:
        raise UserError(f"temperature={temperature}: allowed is 0 (the most likely token) or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k}: allowed is 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p}: allowed is 0 < top_p <= 1")
    if temperature == 0:
        return largest
    generators: dict[torch.device, torch.Generator] = {}

    def draw(logits: Tensor) -> Tensor:
        if logits.device not in generators:
            generators[logits.device] = torch.Generator(logits.device).manual_seed(seed)
        p = torch.softmax(allowed(logits.float() / temperature, top_k, top_p), dim=-1)
        return torch.multinomial(p, 1, generator=generators[logits.device])[:, 0]

    return draw


def allowed(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """logits (rows, V) with everything outside top-k and top-p at minus infinity; at least one token stays."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ascending, order = logits.sort(dim=-1)
        # the mass of a token and of all less likely ones: a token goes where that is not more than 1 - p
        beyond = torch.softmax(ascending, dim=-1).cumsum(dim=-1) <= 1 - top_p
        beyond[:, -1] = False
        logits = logits.masked_fill(beyond.scatter(1, order, beyond), float("-inf"))
    return logits
