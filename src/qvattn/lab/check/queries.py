"""The step for token t uses q_t only: past queries and past scores are read by nothing, so nothing caches them.

Shown by destruction. After every step, all the memory that the step made or wrote is overwritten with NaN: queries,
scores, attention weights, hidden states, everything but the streams in the cache. If anything of it were read later,
NaN would reach the logits. As a control the same NaN goes into one past stream entry, and must reach them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from ...models import Watched
from ...streams import StreamCache
from .result import CheckResult, Details, Measure, Step, above, exactly, information, result, shape
from .spying import Footprints, Seen, address, spying
from .subject import Reader, Subject

NAME = "no-past-queries"
SENTENCES = 3


@dataclass
class Tally:
    """Counts over all sentences. *_bytes: what a cache of all past queries or score rows would have come to hold."""

    logits: int = 0
    changed: int = 0
    overwritten: int = 0
    queries: int = 0
    rows: int = 0
    missed: int = 0
    query_bytes: int = 0
    score_bytes: int = 0
    stream_bytes: int = 0

    def add(self, other: Tally) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@torch.no_grad()
def check(subject: Subject) -> CheckResult:
    """Decode, once untouched and once with all leftovers of each step overwritten; then poison stream entries."""
    tally = Tally()
    readers = subject.longest(SENTENCES)
    for reader in readers:
        tally.add(_poisoned_run(subject, reader, keep_rows=True))
        tally.add(_poisoned_run(subject, reader, keep_rows=False))
    rows, unharmed = _controls(subject, readers[0])
    controls = len(rows)
    measures: list[Measure] = [
        exactly("logits changed by NaN in all past queries and scores", tally.changed, 0),
        information("logits compared, bit for bit", tally.logits),
        above("past query tensors overwritten", tally.queries, 0),
        above("past score rows overwritten", tally.rows, 0),
        exactly("queries or score rows out of reach of the overwriting", tally.missed, 0),
        information("tensors overwritten in all", tally.overwritten),
        information("bytes of a cache of past queries", tally.query_bytes),
        information("bytes of a cache of past scores", tally.score_bytes),
        information("bytes of the streams that were kept", tally.stream_bytes),
    ]
    if controls:
        measures.append(exactly(f"control: of {controls} poisoned stream entries, noticed by no logit", unharmed, 0))
    return result(
        NAME,
        "The step for token t uses q_t only: past queries and past scores are never read again.",
        measures,
        steps=_steps(subject, readers[0]),
        details=Details(
            title="control: NaN in one past entry",
            columns=("layer", "stream", "token", "logits changed"),
            rows=tuple(rows),
        ),
        notes=(
            "The sizes are of self-attention over the sentences above, decoded once. A cache of scores grows with the "
            "square of the length, a cache of queries with the length; both would be written and never read.",
        ),
    )


def _poisoned_run(subject: Subject, reader: Reader, *, keep_rows: bool) -> Tally:
    """One sentence token by token. keep_rows: through the reference kernel, which makes score rows as tensors."""
    stack = subject.model.decoder_stack

    def watched() -> Watched | None:
        return Watched() if keep_rows else None

    # The untouched run comes first: it also fills the tables that depend on distances or parameters alone.
    cache = subject.model.new_cache(1)
    clean = [reader.step(token, cache, watched=watched()) for token in reader.ids.split(1, dim=1)]

    tally, cache = Tally(), subject.model.new_cache(1)
    with _buffers_kept(subject.model), spying(stack) as seen:
        for token, expected in zip(reader.ids.split(1, dim=1), clean, strict=True):
            kept = watched()
            for one in seen:
                one.queries.clear()
            with Footprints() as footprints:
                logits = reader.step(token, cache, watched=kept)
            tally.logits += logits.numel()
            tally.changed += int((logits != expected).sum())
            _count(tally, seen, kept, footprints)
            tally.overwritten += footprints.poison(spare=_kept_memory(subject, cache))
    tally.stream_bytes = cache.nbytes if keep_rows else 0
    return tally


def _count(tally: Tally, seen: list[Seen], kept: Watched | None, footprints: Footprints) -> None:
    queries = [(q, one.cross) for one in seen for made in one.queries for q in made.values()]
    rows = [] if kept is None else kept.self_weights
    tally.queries += len(queries)
    tally.rows += sum(a.shape[0] * a.shape[1] * a.shape[2] for a in rows)
    tally.missed += sum(q not in footprints for q, _ in queries) + sum(a not in footprints for a in rows)
    if kept is not None:
        tally.query_bytes += sum(q.numel() * q.element_size() for q, cross in queries if not cross)
        tally.score_bytes += sum(a.numel() * a.element_size() for a in rows)


def _kept_memory(subject: Subject, cache: StreamCache) -> set[int]:
    """Addresses of what may be read again: the streams in the cache, and the parameters."""
    streams = {address(s) for layer in subject.owners for s in cache.read(layer).values()}
    return streams | {address(p) for p in subject.model.parameters()}


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Give the model its buffers back, should a step have written to them and they were overwritten."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.copy_(value)


def _controls(subject: Subject, reader: Reader) -> tuple[list[tuple[int | str, ...]], int]:
    """NaN in the oldest visible entry of each stream: rows of the table, and how many changed no logit."""
    last = reader.length - 1
    token = subject.oldest_visible(last)
    if token == last:
        return [], 0
    rows: list[tuple[int | str, ...]] = []
    unharmed = 0
    past = reader.fill(reader.ids[:, :last])
    expected = reader.step(reader.ids[:, last:], past.fork())
    for layer in subject.owners:
        for name in past.read(layer):
            twin = past.fork()
            twin.read(layer)[name][:, :, token] = float("nan")
            changed = int((reader.step(reader.ids[:, last:], twin) != expected).sum())
            unharmed += changed == 0
            rows.append((layer, name, token + 1, f"{changed:,} of {expected.numel():,}"))
    return rows, unharmed


def _steps(subject: Subject, reader: Reader) -> tuple[Step, ...]:
    cache = reader.fill(reader.ids[:, :-1])
    with spying(subject.model.decoder_stack) as seen:
        reader.step(reader.ids[:, -1:], cache)
    own: dict[str, Tensor] = dict(seen[0].queries[-1])
    past = dict(cache.read(subject.owners[0]))
    heads = subject.model.attention_spec.n_heads
    return (
        Step(
            what="queries of the new token",
            shapes=", ".join(f"{name} {shape(q)}" for name, q in own.items()),
            why="made from the new token alone; one row, not t rows",
        ),
        Step(
            what="streams of all tokens, from the cache",
            shapes=", ".join(f"{name} {shape(s)}" for name, s in past.items()),
            why="the new query meets every past token's entry: this is what must be kept",
        ),
        Step(
            what="the new score row",
            shapes=f"(1, {heads}, 1, {cache.length})",
            why="row t of the score matrix; rows 1..t-1 would be needed to output tokens 1..t-1 again, and never are",
        ),
        Step(
            what="overwrite everything the step made, but the streams",
            shapes="every tensor -> NaN",
            why="whoever kept a past query or score, by reference or by copy, now holds NaN",
        ),
    )
