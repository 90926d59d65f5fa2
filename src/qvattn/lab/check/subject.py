"""What is checked: a trained model with real sentences, and its decoder bound to one of them.

Both model types look the same from here: ids at positions, over a cache, to logits. The checks use the model's public
parts only (`new_cache`, `decode` or `hidden`, `logits`), so that a broken model or cache is seen as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...attention import Attention
from ...errors import UserError
from ...models import CausalLM, Memory, QvattnModel, TranslationModel, Watched
from ...streams import StreamCache

SHORTEST = 5
"""Tokens a sentence needs, so that there is a past to speak of."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Decoder ids (1, T) of a real sentence, the start token first where the model has one; source (1, S)."""

    ids: Tensor
    source: Tensor | None = None

    @property
    def length(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in evaluation mode and its sentences. seed: of everything a check draws."""

    model: QvattnModel
    samples: Sequence[Sample]
    name: str = "model"
    data: str = ""
    seed: int = 1
    readers: list[Reader] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.model, TranslationModel | CausalLM):
            raise UserError(f"model of type {type(self.model).__name__}: a TranslationModel or a CausalLM is needed")
        short = [sample.length for sample in self.samples if sample.length < SHORTEST]
        if short or not self.samples:
            raise UserError(f"sentences of {short or 'no'} tokens: at least one, of {SHORTEST} or more, is needed")
        self.model.eval()
        self.readers.extend(Reader(self.model, sample) for sample in self.samples)
        with torch.no_grad():
            wrong = [i for i, reader in enumerate(self.readers, start=1) if not reader.full().isfinite().all()]
        if wrong:
            raise UserError(f"the model gives logits that are not finite, in sentence {wrong[0]}: nothing to check")

    def longest(self, count: int) -> list[Reader]:
        """The readers of the `count` longest sentences."""
        return sorted(self.readers, key=lambda reader: -reader.length)[:count]

    def generator(self) -> torch.Generator:
        """A fresh source of random numbers, the same for every check."""
        return torch.Generator().manual_seed(self.seed)

    @property
    def attentions(self) -> list[Attention]:
        """The decoder's self-attention, layer by layer."""
        return [block.self_attn for block in self.model.decoder_stack.blocks()]

    @property
    def owners(self) -> list[int]:
        """Layers that make streams of their own (the others borrow)."""
        return [i for i, attention in enumerate(self.attentions) if not attention.borrows]

    @property
    def first(self) -> int:
        """Index of the first token that is free: the one after the start token of a translation."""
        return 1 if isinstance(self.model, TranslationModel) else 0

    def oldest_visible(self, index: int) -> int:
        """Index of the oldest free token that a query at `index` sees; `index` itself where a window hides the past."""
        windows = [attention.spec.window for attention in self.attentions]
        seen = [self.first if window is None else max(self.first, index - window + 1) for window in windows]
        return min(seen)

    def other_token(self, reader: Reader, index: int) -> int:
        """A real token that is not the one at `index`: the one another sentence has there, or any other of them."""
        own = int(reader.ids[0, index])
        rows = [r.ids[0] for r in self.readers if r is not reader]
        same_place = [int(row[index]) for row in rows if len(row) > index]
        anywhere = [int(token) for row in [reader.ids[0], *rows] for token in row[self.first :]]
        return next((token for token in [*same_place, *anywhere] if token != own), own)


class Reader:
    """The decoder over one sample; its source is encoded once."""

    def __init__(self, model: QvattnModel, sample: Sample) -> None:
        self.model, self.ids = model, sample.ids
        self.memory: Memory | None = None
        if isinstance(model, TranslationModel):
            if sample.source is None:
                raise UserError("sample.source=None: a translation model needs the source sentence")
            with torch.no_grad():
                encoded = model.encode(sample.source)
                self.memory = model.remember(encoded, model.source_positions(sample.source, None))

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: StreamCache | None = None, watched: Watched | None = None
    ) -> Tensor:
        """Ids (B, M) at positions (B, M) -> (B, M, E); B rows share the one source."""
        if isinstance(self.model, TranslationModel):
            assert self.memory is not None
            return self.model.decode(ids, positions, self.memory, cache, watched)
        assert isinstance(self.model, CausalLM)
        return self.model.hidden(ids, positions, cache, watched)

    def logits(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.model, TranslationModel | CausalLM)
        return self.model.logits(hidden)

    def full(self, ids: Tensor | None = None, watched: Watched | None = None) -> Tensor:
        """One pass without a cache over ids (1, T), default: the sentence -> logits (1, T, V)."""
        ids = self.ids if ids is None else ids
        positions = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)[None]
        return self.logits(self.hidden(ids, positions, None, watched))

    @torch.no_grad()
    def step(
        self, ids: Tensor, cache: StreamCache, positions: Tensor | None = None, watched: Watched | None = None
    ) -> Tensor:
        """Append ids (1, M) to the cache -> their logits (1, M, V). positions: default, after the cached ones."""
        if positions is None:
            positions = cache.next_positions(ids.shape[1])
        return self.logits(self.hidden(ids, positions, cache, watched))

    def fill(self, ids: Tensor, cache: StreamCache | None = None) -> StreamCache:
        """A cache that holds ids (1, T), prefilled in one piece."""
        cache = self.model.new_cache(1) if cache is None else cache
        self.step(ids, cache)
        return cache

    def steps(self, chunks: Sequence[int], cache: StreamCache | None = None) -> Iterator[tuple[Tensor, StreamCache]]:
        """Decode the sentence in pieces of these sizes: logits (1, M, V) and the cache after each."""
        cache = self.model.new_cache(1) if cache is None else cache
        for piece in self.ids.split(list(chunks), dim=1):
            yield self.step(piece, cache), cache


def random_chunks(total: int, generator: torch.Generator) -> list[int]:
    """Sizes that sum to `total`: every place between two tokens is a split point with probability one half."""
    cuts = [i for i in range(1, total) if torch.rand((), generator=generator) < 0.5]
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
