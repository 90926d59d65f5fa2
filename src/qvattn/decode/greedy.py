"""The decoding loop that takes one token a step: greedy, and what sampling is made of.

Gives the tokens that `generate(do_sample=False)` gives. Rows that have ended leave the batch when enough of them have,
since a smaller batch only pays if the copying is worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import UserError
from ..models import QvattnModel
from .choice import largest
from .session import LeanModel, Session, as_lean, stop_ids

Choose = Callable[[Tensor], Tensor]
"""Logits (rows, V) -> tokens (rows,)."""
WORTH_DROPPING = 8
"""A batch is made smaller once one in so many of its rows has ended."""


@torch.inference_mode()
def greedy(
    model: QvattnModel | LeanModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 256,
    limits: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> Tensor:
    """The most likely token, step by step, until end-of-sentence.

    input_ids, attention_mask: sources (B, S), or for a language model prompts padded on the left.
    limits: (B,) the most new tokens of each row, beside max_new_tokens.  eos_token_id: default, the model's.
    Returns (B, 1 + n) ids from the start token on, or (B, S + n) for a language model, padded after the end: what
    `generate(do_sample=False)` returns.
    """
    session = as_lean(model).open(input_ids, attention_mask)
    return run_session(
        session, input_ids, largest, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, limits=limits
    )


def decode_rows(
    session: Session,
    choose: Choose,
    *,
    max_new_tokens: int,
    eos: Sequence[int],
    limits: Tensor | None = None,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """New tokens (rows, n) int64, padded after the end. on_tokens: sees the tokens (rows,) of every step."""
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}: allowed is 1 or more")
    if limits is not None and (limits.shape != (session.rows,) or int(limits.min()) < 1):
        raise UserError(f"limits of shape {tuple(limits.shape)}: allowed is a positive number for each of the rows")
    logits = session.begin()
    rows, device = session.rows, logits.device
    out = torch.full((rows, max_new_tokens), session.lean.pad, device=device)
    where = torch.arange(rows, device=device)  # the row of `out` that each row of the session writes
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    count = 0
    for step in range(max_new_tokens):
        tokens = choose(session.suppress(logits))
        if count:
            tokens = tokens.masked_fill(ended, session.lean.pad)
        out[where, step] = tokens
        if on_tokens is not None:
            on_tokens(out[:, step])
        for token in eos:
            ended = ended | (tokens == token)
        if limits is not None:
            ended = ended | (limits[where] <= step + 1)
        count = int(ended.sum()) if eos or limits is not None else 0  # waits for the device: once a step
        if count == ended.shape[0] or step + 1 == max_new_tokens:
            return out[:, : step + 1]
        if count * WORTH_DROPPING >= ended.shape[0]:
            kept = _drop(session, ended)
            where, tokens, ended = where[kept], tokens[kept], ended[kept]
        logits = session.step(tokens)
    return out


def _drop(session: Session, ended: Tensor) -> Tensor:
    """Drop the groups of rows (those of one source) that have all ended; the rows that were kept."""
    groups = ended.view(session.groups, -1)
    kept = (~groups.all(dim=1)).nonzero()[:, 0]
    rows = torch.arange(ended.shape[0], device=ended.device).view(groups.shape)[kept].flatten()
    if kept.shape[0] < groups.shape[0]:
        session.keep(kept, rows)
    return rows


def run_session(
    session: Session,
    input_ids: Tensor,
    choose: Choose,
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    limits: Tensor | None = None,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Prompt (or start token) and new tokens of a session, (rows, L)."""
    lean_model = session.lean
    new = decode_rows(
        session,
        choose,
        max_new_tokens=max_new_tokens,
        eos=stop_ids(lean_model, eos_token_id),
        limits=limits,
        on_tokens=on_tokens,
    )
    head = lean_model.head(input_ids, new)
    return torch.cat((head.repeat_interleave(new.shape[0] // head.shape[0], dim=0), new), dim=1)
