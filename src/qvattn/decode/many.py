"""Greedy decoding of many sources through a fixed number of rows: a row that ends takes the next source.

The products of a step cost nearly the same for a few rows as for many, so rows must not stand idle. A source begins in
a freed row at position 0 while its neighbours are elsewhere; to it, what the row held before is padding. Sources are
taken longest first, so that the rows have similar sources; results come back in the order of the sources, and are
those of `greedy`, whatever stood beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import UserError
from ..models import Memory, QvattnModel
from ..streams import PADDING
from .choice import largest
from .session import LeanModel, TranslationSession, as_lean, padded, stop_ids

WORTH_FILLING = 3
"""Freed rows are filled together once there are so many: a filling costs about a tenth of a step."""
COMPACT_AT = 32
"""Tokens at the front of the cache that nobody sees any more, before the rest is moved."""


@torch.inference_mode()
def greedy_many(
    model: QvattnModel | LeanModel,
    sources: Sequence[Sequence[int]],
    *,
    rows: int = 32,
    max_new_tokens: int = 256,
    limits: Sequence[int] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """New tokens of each source (ids, end-of-sentence included), their own end-of-sentence included.

    rows: sources decoded at once.  limits: the most new tokens of each source, beside max_new_tokens.
    on_done: told how many more sources are finished.
    """
    if rows < 1 or max_new_tokens < 1:
        raise UserError(f"rows={rows}, max_new_tokens={max_new_tokens}: allowed is 1 or more")
    lean_model = as_lean(model)
    if not lean_model.is_translation:
        raise UserError("greedy_many decodes sources of a translation model; for prompts use greedy")
    bounds = [max_new_tokens] * len(sources) if limits is None else [min(n, max_new_tokens) for n in limits]
    if len(bounds) != len(sources) or min(bounds, default=1) < 1:
        raise UserError(f"limits: {len(bounds)} numbers, allowed are {len(sources)} of 1 or more")
    if not sources:
        return []
    flow = _Flow(lean_model, sources, rows, bounds, set(stop_ids(lean_model, eos_token_id)), on_done)
    return flow.run()


class _Flow:
    """The rows and what they hold: for each its source, its tokens so far, and the slot its past begins at."""

    def __init__(
        self,
        lean_model: LeanModel,
        sources: Sequence[Sequence[int]],
        rows: int,
        bounds: Sequence[int],
        ends: set[int],
        on_done: Callable[[int], None] | None,
    ) -> None:
        self.lean, self.sources, self.bounds, self.ends, self.on_done = lean_model, sources, bounds, ends, on_done
        self.results: list[list[int]] = [[] for _ in sources]
        order = sorted(range(len(sources)), key=lambda i: (-len(sources[i]), i))
        rows = min(rows, len(order))
        self.holds: list[int | None] = list(order[:rows])
        self.starts = [0] * rows
        self.waiting = _Waiting(lean_model, sources, order[rows:], rows)
        ids, mask = padded([sources[i] for i in order[:rows]], lean_model.pad)
        self.session = TranslationSession(lean_model, ids.to(lean_model.device), mask.to(lean_model.device), 1)

    def run(self) -> list[list[int]]:
        logits = self.session.begin()
        self.session.ragged()
        while True:
            tokens = largest(self.session.suppress(logits))
            freed = self._take(tokens.tolist())
            free = [r for r, source in enumerate(self.holds) if source is None]
            if freed and len(free) >= min(WORTH_FILLING, max(1, len(self.holds) // 4)):
                tokens = self._fill(free, tokens) if self.waiting.left else self._drop(free, tokens)
                if not self.holds:
                    return self.results
            logits = self.session.step(tokens)

    def _take(self, tokens: list[int]) -> int:
        """Give each source its token; how many rows have come to an end."""
        freed = 0
        for row, token in enumerate(tokens):
            source = self.holds[row]
            if source is None:
                continue
            made = self.results[source]
            made.append(token)
            if token in self.ends or len(made) >= self.bounds[source]:
                self.holds[row] = None
                freed += 1
        if freed and self.on_done is not None:
            self.on_done(freed)
        return freed

    def _fill(self, free: list[int], tokens: Tensor) -> Tensor:
        """Begin waiting sources in free rows."""
        session = self.session
        taken, memory = self.waiting.take(len(free))
        index = torch.tensor(free[: len(taken)], device=tokens.device)
        assert session.memory is not None
        replace_rows(session.memory, index, memory)
        session.begin_again(index)
        for row, source in zip(free, taken, strict=False):
            self.holds[row], self.starts[row] = source, session.cache.length
        self._tidy()
        return tokens.index_fill(0, index, self.lean.start)

    def _drop(self, free: list[int], tokens: Tensor) -> Tensor:
        """Go on without the free rows, since nothing is waiting."""
        kept = [row for row, source in enumerate(self.holds) if source is not None]
        self.holds, self.starts = [self.holds[r] for r in kept], [self.starts[r] for r in kept]
        if not kept:
            return tokens
        index = torch.tensor(kept, device=tokens.device)
        self.session.keep(index, index)
        self._tidy()
        return tokens[index]

    def _tidy(self) -> None:
        """Move the cache to the front when much of it belongs to nobody; narrow the memory to the longest source."""
        session = self.session
        dead = min(self.starts[r] for r, source in enumerate(self.holds) if source is not None)
        if dead >= COMPACT_AT and 2 * dead >= session.cache.length:
            session.cache.drop_first(dead)
            self.starts = [max(0, start - dead) for start in self.starts]
        longest = max(len(self.sources[source]) for source in self.holds if source is not None)
        assert session.memory is not None
        if longest < session.memory.positions.shape[1]:
            session.memory = narrowed(session.memory, longest)
        session.last = max(len(self.results[source]) for source in self.holds if source is not None)


class _Waiting:
    """Sources in line, encoded some at a time; `order` falls in length."""

    def __init__(self, lean_model: LeanModel, sources: Sequence[Sequence[int]], order: list[int], some: int) -> None:
        self.lean, self.sources, self.order, self.some = lean_model, sources, order, some
        self.left = len(order)
        self._ready = self._encoded()
        self._chunk: tuple[list[int], Memory] | None = None
        self._used = 0

    def _encoded(self) -> Iterator[tuple[list[int], Memory]]:
        for start in range(0, len(self.order), self.some):
            chunk = self.order[start : start + self.some]
            ids, mask = padded([self.sources[i] for i in chunk], self.lean.pad)
            yield chunk, self.lean.encode(ids.to(self.lean.device), mask.to(self.lean.device))

    def take(self, count: int) -> tuple[list[int], Memory]:
        """Up to `count` sources (those of one chunk) and their memory."""
        if self._chunk is None or self._used == len(self._chunk[0]):
            self._chunk, self._used = next(self._ready), 0
        chunk, memory = self._chunk
        part = slice(self._used, self._used + count)
        taken = chunk[part]
        self._used += len(taken)
        self.left -= len(taken)
        return taken, Memory(memory.positions[part], [_each(layer, part) for layer in memory.streams])


def _each(layer: Mapping[str, Tensor], part: slice) -> dict[str, Tensor]:
    return {name: stream[part] for name, stream in layer.items()}


def replace_rows(memory: Memory, rows: Tensor, by: Memory) -> None:
    """Put sources that are not longer into these rows of a memory, in place."""
    length = by.positions.shape[1]
    memory.positions[rows] = PADDING
    memory.positions[rows, :length] = by.positions
    for mine, theirs in zip(memory.streams, by.streams, strict=True):
        for name, stream in mine.items():
            stream[rows, :, :length] = theirs[name]


def narrowed(memory: Memory, length: int) -> Memory:
    """A view of the first `length` positions of every source."""
    streams = [{name: stream[:, :, :length] for name, stream in layer.items()} for layer in memory.streams]
    return Memory(memory.positions[:, :length], streams)
