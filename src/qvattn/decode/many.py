"""Greedy decoding of many sources through a fixed number of rows: a row that ends takes the next source.

The products of a step cost nearly the same for a few rows as for many, so rows must not stand idle. Rows stand at
positions of their own; the cache keeps the token at position p in slot p of its row, so that a row which begins anew
overwrites what it held, and the cache stays as long as the longest running row. Sources are taken longest first, so
that rows have similar sources. Results come back in the order of the sources, and are those of `greedy`, whatever stood
beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import UserError
from ..models import Memory, QvattnModel
from ..streams import PADDING, StreamCache
from .choice import largest
from .session import LeanModel, TranslationSession, as_lean, padded, stop_ids
from .step import StepGeometry

WORTH_FILLING = 3
"""Freed rows are filled together once there are so many: a filling costs about a tenth of a step."""


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
    """The rows, and the source that each of them holds (None: it is free)."""

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
        self.waiting = _Waiting(lean_model, sources, order[rows:], rows)
        ids, mask = padded([sources[i] for i in order[:rows]], lean_model.pad)
        self.session = RowSession(lean_model, ids.to(lean_model.device), mask.to(lean_model.device))

    def run(self) -> list[list[int]]:
        logits = self.session.begin()
        while True:
            tokens = largest(self.session.suppress(logits))
            freed = self._take(tokens.tolist())
            if freed:
                self.session.begin_again(torch.tensor(freed, device=tokens.device))
                free = [r for r, source in enumerate(self.holds) if source is None]
                if len(free) >= min(WORTH_FILLING, max(1, len(self.holds) // 4)):
                    tokens = self._fill(free, tokens) if self.waiting.left else self._drop(tokens)
                    if not self.holds:
                        return self.results
            self.session.last = max(len(self.results[s]) for s in self.holds if s is not None)
            logits = self.session.step(tokens)

    def _take(self, tokens: list[int]) -> list[int]:
        """Give each source its token; the rows that have come to an end."""
        freed = []
        for row, token in enumerate(tokens):
            source = self.holds[row]
            if source is None:
                continue
            made = self.results[source]
            made.append(token)
            if token in self.ends or len(made) >= self.bounds[source]:
                self.holds[row] = None
                freed.append(row)
        if freed and self.on_done is not None:
            self.on_done(len(freed))
        return freed

    def _fill(self, free: list[int], tokens: Tensor) -> Tensor:
        """Begin waiting sources in free rows."""
        session = self.session
        taken, memory = self.waiting.take(len(free))
        rows = torch.tensor(free[: len(taken)], device=tokens.device)
        assert session.memory is not None
        session.memory = with_rows(session.memory, rows, memory)
        session.begin_again(torch.tensor(free, device=tokens.device))  # so that no free row runs ahead of the others
        for row, source in zip(free, taken, strict=False):
            self.holds[row] = source
        longest = max(len(self.sources[source]) for source in self.holds if source is not None)
        if longest < session.memory.positions.shape[1]:
            session.memory = narrowed(session.memory, longest)
        return tokens.index_fill(0, rows, self.lean.start)

    def _drop(self, tokens: Tensor) -> Tensor:
        """Go on without the free rows, since nothing is waiting."""
        kept = [row for row, source in enumerate(self.holds) if source is not None]
        self.holds = [self.holds[row] for row in kept]
        if not kept:
            return tokens
        rows = torch.tensor(kept, device=tokens.device)
        self.session.keep(rows, rows)
        return tokens[rows]


class RowCache(StreamCache):
    """A cache whose rows advance one token at a time, each at its own position: position p lies in slot p.

    The heads of a token lie together in memory, so that a step writes one run of numbers per row and stream.
    """

    def _allocate(self, heads: int, width: int, dtype: torch.dtype) -> Tensor:
        # slots that a row has not come to yet are hidden but may be read: they must hold numbers
        shape = (self.batch_size, self._capacity, heads, width)
        return torch.zeros(shape, dtype=dtype, device=self.device).transpose(1, 2)

    def _selected(self, buffer: Tensor, index: Tensor) -> Tensor:
        return buffer.transpose(1, 2).index_select(0, index).transpose(1, 2)

    def advance_to(self, positions: Tensor, last: int) -> None:
        """Begin a step: the position (B, 1) of each row's new token, none beyond `last`."""
        self.reserve(last + 1)
        self.length = last + 1
        slots = positions.long()
        self._positions.scatter_(1, slots, positions)
        rows = torch.arange(self.batch_size, device=self.device)
        self._places = rows * self._capacity + slots[:, 0]

    def write(self, layer: int, entries: Mapping[str, Tensor]) -> None:
        for name, entry in entries.items():
            runs = self._layers[layer][name].transpose(1, 2).flatten(0, 1).flatten(1)
            runs.index_copy_(0, self._places, entry.flatten(1))

    def forget(self, rows: Tensor) -> None:
        """Make the whole past of these rows padding."""
        self._positions[rows] = PADDING


class RowSession(TranslationSession):
    """A session whose rows stand at positions of their own. The caller sets `last`, the largest of them."""

    cache: RowCache

    def __init__(self, lean_model: LeanModel, input_ids: Tensor, mask: Tensor) -> None:
        super().__init__(lean_model, input_ids, mask, 1)
        old, stack = self.cache, lean_model.model.decoder_stack
        self.cache = RowCache(stack.cache_layers, old.batch_size, dtype=old.dtype, device=old.device)
        self.plain, self.last = False, 0
        self._next = torch.zeros(old.batch_size, 1, dtype=torch.int32, device=old.device)

    def step(self, tokens: Tensor) -> Tensor:
        positions, cache, stack = self._next, self.cache, self.lean.stack
        assert positions is not None
        self._next = positions + 1
        cache.advance_to(positions, self.last)
        geometry = StepGeometry(positions, cache.positions, window=stack.window, last=self.last, plain=False)
        return stack.step(tokens[:, None], geometry, cache, self.memory)

    def begin_again(self, rows: Tensor) -> None:
        """Let these rows begin at position 0; their past is padding."""
        assert self._next is not None
        self.cache.forget(rows)
        self._next = self._next.index_fill(0, rows, 0)


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


def with_rows(memory: Memory, rows: Tensor, by: Memory) -> Memory:
    """The memory with other sources, none longer than its longest, in these rows; it takes the streams over.

    A memory of its own, with positions of its own: what was worked out from the old ones no longer holds.
    """
    length = by.positions.shape[1]
    positions = memory.positions.index_fill(0, rows, PADDING)
    positions[rows, :length] = by.positions
    for mine, theirs in zip(memory.streams, by.streams, strict=True):
        for name, stream in mine.items():
            stream[rows, :, :length] = theirs[name]
    return Memory(positions, memory.streams)


def narrowed(memory: Memory, length: int) -> Memory:
    """A view of the first `length` positions of every source."""
    streams = [{name: stream[:, :, :length] for name, stream in layer.items()} for layer in memory.streams]
    return Memory(memory.positions[:, :length], streams)
