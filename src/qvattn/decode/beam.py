"""Beam search with the hypotheses, scores and stopping rules of transformers' `generate(num_beams=...)`.

A hypothesis scores sum log p / n^length_penalty over its n new tokens, end-of-sentence included. At every step the best
2 * beam continuations of a source are looked at: those among the first `beam` that end are finished, the best `beam`
that do not end go on. When a source stops, by `early_stopping` as in transformers:
    False    when the best running beam, scored at its present length, cannot beat the worst of `beam` finished ones;
    "never"  the same, but a running beam is scored at the greatest length it may reach (for a positive length penalty);
    True     as soon as `beam` hypotheses are finished.
Sources do not touch each other: what a source gives does not depend on its neighbours, and sources that have stopped
leave the batch. Beams share the memory of their source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import UserError
from ..models import QvattnModel
from .choice import largest_sums
from .session import LeanModel, Session, as_lean, stop_ids

EarlyStopping = bool | Literal["never"]
NEVER = -1.0e9
"""A score below all that occur (the number that transformers uses)."""
WORTH_DROPPING = 8


@dataclass(frozen=True)
class Hypotheses:
    """sequences: (B, beam, L) ids from the start token (or prompt) on, padded after the end, best first.

    scores: (B, beam), sum log p / n^length_penalty; about -1e9 where fewer than `beam` hypotheses were found.
    """

    sequences: Tensor
    scores: Tensor


@torch.inference_mode()
def beam_search(
    model: QvattnModel | LeanModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    beam: int = 5,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    max_new_tokens: int = 256,
    eos_token_id: int | Sequence[int] | None = None,
) -> Hypotheses:
    """The `beam` best hypotheses of each source (B, S), or continuations of each prompt padded on the left.

    Gives what `generate(num_beams=beam, num_return_sequences=beam, ...)` gives with the same settings.
    """
    if beam < 1:
        raise UserError(f"beam={beam}: allowed is 1 or more")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}: allowed is 1 or more")
    if early_stopping not in (True, False, "never"):
        raise UserError(f"early_stopping={early_stopping!r}: allowed are True, False, 'never'")
    lean_model = as_lean(model)
    session = lean_model.open(input_ids, attention_mask, copies=beam)
    search = _Search(
        session,
        beam=beam,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        limit=max_new_tokens,
        eos=stop_ids(lean_model, eos_token_id),
    )
    new, scores = search.run()
    head = lean_model.head(input_ids, new)
    return Hypotheses(torch.cat((head[:, None].expand(-1, beam, -1), new), dim=2), scores)


class _Search:
    """The running state. B: sources still running, K: beams, C: candidates looked at per source, L: new tokens so far.

    running, running_scores: (B, K, limit), (B, K).  done, done_scores: the finished ones, best first.
    """

    def __init__(
        self,
        session: Session,
        *,
        beam: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        limit: int,
        eos: Sequence[int],
    ) -> None:
        self.session, self.beam, self.limit, self.eos = session, beam, limit, list(eos)
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.candidates = max(2, 1 + len(self.eos)) * beam

    def _start(self, sources: int, device: torch.device) -> None:
        K, pad = self.beam, self.session.lean.pad
        self.running = torch.full((sources, K, self.limit), pad, device=device)
        self.running_scores = torch.full((sources, K), NEVER, device=device)
        self.running_scores[:, 0] = 0  # all beams begin alike: only the first may be continued
        self.done, self.is_done = self.running.clone(), torch.zeros(sources, K, dtype=torch.bool, device=device)
        self.done_scores = torch.full((sources, K), NEVER, device=device)
        self.done_lengths = torch.zeros(sources, K, dtype=torch.long, device=device)
        self.open = torch.ones(sources, dtype=torch.bool, device=device)
        self.where = torch.arange(sources, device=device)
        self.base = torch.arange(sources, device=device)[:, None] * K
        self.results, self.result_scores = self.done.clone(), self.done_scores.clone()
        self.longest = 0

    def run(self) -> tuple[Tensor, Tensor]:
        """New tokens (B, K, L) and scores (B, K)."""
        logits = self.session.begin()
        self._start(logits.shape[0] // self.beam, logits.device)
        for length in range(1, self.limit + 1):
            tokens, parents = self._advance(logits, length)
            self._judge(length)
            open_count = int(self.open.sum())
            if open_count == 0 or length == self.limit:
                break
            rows = (self.base + parents).flatten()
            tokens = tokens.flatten()
            if (self.open.shape[0] - open_count) * WORTH_DROPPING >= self.open.shape[0]:
                rows, tokens = self._drop_stopped(rows, tokens)
            else:
                self.session.reorder(rows)
            logits = self.session.step(tokens)
        self._bank(torch.arange(self.where.shape[0], device=self.where.device))
        return self.results[:, :, : self.longest], self.result_scores

    def _advance(self, logits: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Choose continuations: tokens (B, K) of the beams that go on, and the beams (B, K) they continue."""
        K = self.beam
        log_p = self.session.suppress(torch.log_softmax(logits.float(), dim=-1))
        best, parents, tokens = largest_sums(log_p, self.running_scores, self.candidates)
        ends = torch.zeros_like(tokens, dtype=torch.bool)
        for token in self.eos:
            ends |= tokens == token
        if length == self.limit:
            ends = torch.ones_like(ends)
        self._finish(best, parents, tokens, ends, length)
        going, order = best.masked_fill(ends, NEVER).topk(K)
        parents, tokens = parents.gather(1, order), tokens.gather(1, order)
        self.running = self._follow(parents, tokens, length)
        self.running_scores = going
        return tokens, parents

    def _follow(self, parents: Tensor, tokens: Tensor, length: int) -> Tensor:
        """The sequences of these beams with these tokens added, (B, n, limit)."""
        sequences = self.running.gather(1, parents[:, :, None].expand(-1, -1, self.limit))
        sequences[:, :, length - 1] = tokens
        return sequences

    def _finish(self, best: Tensor, parents: Tensor, tokens: Tensor, ends: Tensor, length: int) -> None:
        """Merge candidates that end into the finished hypotheses of the sources that are still open."""
        K = self.beam
        new = ends[:, :K] & self.open[:, None]
        if self.early_stopping is True:
            new = new & ~self.is_done.all(dim=1, keepdim=True)
        if not bool(new.any()):
            return
        scores = (best[:, :K] / length**self.length_penalty).masked_fill(~new, NEVER)
        sequences = self._follow(parents[:, :K], tokens[:, :K], length)
        self.done_scores, order = torch.cat((self.done_scores, scores), dim=1).topk(K)
        wide = order[:, :, None].expand(-1, -1, self.limit)
        self.done = torch.cat((self.done, sequences), dim=1).gather(1, wide)
        self.is_done = torch.cat((self.is_done, new), dim=1).gather(1, order)
        self.done_lengths = torch.cat((self.done_lengths, new * length), dim=1).gather(1, order)

    def _judge(self, length: int) -> None:
        """Close the sources that cannot improve, by the rule in the module head."""
        at_best = self.limit if self.early_stopping == "never" and self.length_penalty > 0 else length
        possible = self.running_scores[:, 0] / at_best**self.length_penalty
        full = self.is_done.all(dim=1)
        improvable = ~full | (possible > self.done_scores.amin(dim=1))
        self.open = self.open & improvable
        if self.early_stopping is True:
            self.open = self.open & ~full

    def _drop_stopped(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Bank the results of stopped sources and go on without them."""
        kept, stopped = self.open.nonzero()[:, 0], (~self.open).nonzero()[:, 0]
        self._bank(stopped)
        for name in ("running", "running_scores", "done", "done_scores", "done_lengths", "is_done", "open", "where"):
            setattr(self, name, getattr(self, name)[kept])
        self.session.keep(kept, rows.view(-1, self.beam)[kept].flatten())
        self.base = self.base[: kept.shape[0]]
        return rows, tokens.view(-1, self.beam)[kept].flatten()

    def _bank(self, sources: Tensor) -> None:
        self.results[self.where[sources]] = self.done[sources]
        self.result_scores[self.where[sources]] = self.done_scores[sources]
        self.longest = max(self.longest, int(self.done_lengths[sources].max()))
