"""What the planner knows of a model: its layers, what each stores per token, and how many weights there are.

Nothing here knows a model family or a variant by name; costs are computed from these numbers in `costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from ...errors import UserError
from ...spec import AttentionSpec
from ...streams import Stream, cache_elements

SCALE_BYTES = torch.float32.itemsize
"""An int8 cache keeps one float32 scale per token and shared head of every stream (`StreamCache`)."""


def scale_bytes(streams: Sequence[Stream], dtype: torch.dtype) -> int:
    """Bytes per token of the scales that a cache of this dtype keeps beside the entries."""
    return SCALE_BYTES * sum(stream.heads for stream in streams) if dtype is torch.int8 else 0


@dataclass(frozen=True, kw_only=True)
class State:
    """A tensor of constant size that a layer keeps per row (convolution or recurrent state).

    itemsize: bytes of an element where the model fixes it, None: as the cache's dtype.
    recurrent: it is updated and read by every token (operations are counted), not only shifted.
    """

    name: str
    elements: int
    itemsize: int | None = None
    recurrent: bool = False


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer as far as decoding has to remember something.

    kind: what layers of this sort are called in tables.  spec: its attention; None where it has none.
    stored: the streams that the model's own implementation keeps per token; () where it borrows.
    keeps: tokens kept at most (sliding windows that are cut), None: all.
    borrows: attends over the streams of an earlier layer.  over_source: over the encoder's tokens, not the decoder's.
    states: constant memory per row.
    exact: variants that compute the same function from this layer's own weights.
    """

    kind: str
    spec: AttentionSpec | None = None
    stored: tuple[Stream, ...] = ()
    keeps: int | None = None
    borrows: bool = False
    over_source: bool = False
    states: tuple[State, ...] = ()
    exact: tuple[str, ...] = ()
    reads: int | None = None
    """Elements read per visible token, where that is not what `spec` says."""

    @classmethod
    def attention(cls, kind: str, spec: AttentionSpec, *, borrows: bool = False, **more: object) -> Self:
        """A layer that stores what its spec says."""
        return cls(kind=kind, spec=spec, stored=() if borrows else spec.streams, borrows=borrows, **more)  # type: ignore[arg-type]

    @property
    def stored_elements(self) -> int:
        """Elements stored per token that is kept."""
        return cache_elements(self.stored)

    def stored_bytes(self, dtype: torch.dtype) -> int:
        """Bytes stored per token that is kept, scales of int8 included."""
        return self.stored_elements * dtype.itemsize + scale_bytes(self.stored, dtype)

    def read_bytes(self, dtype: torch.dtype) -> int:
        """Bytes read per visible token, scales of int8 included."""
        lent = self.spec.streams if self.borrows and self.spec is not None else self.stored
        return self.read_elements * dtype.itemsize + scale_bytes(lent, dtype)

    @property
    def read_elements(self) -> int:
        """Elements read per visible token: those stored here or, where it borrows, by another layer."""
        if self.reads is not None:
            return self.reads
        return 0 if self.spec is None else self.spec.cache_elements_per_token if self.borrows else self.stored_elements

    def kept(self, tokens: int) -> int:
        """How many of `tokens` tokens are stored."""
        return tokens if self.keeps is None else min(tokens, self.keeps)

    def converted(self, spec: AttentionSpec) -> Layer:
        """The same layer with other attention; it keeps as many tokens and borrows as before."""
        return replace(self, spec=spec, stored=() if self.borrows else spec.streams, reads=None)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameters of a model by what a decoding step does with them.

    total: all of them, encoder and lookup tables included, shared ones once.
    read: read by every decoded token (no lookup table unless it is the output projection too, no encoder), no experts.
    experts: in all routed experts together.  expert_count, experts_per_token: of one layer.
    """

    total: int
    read: int
    experts: int = 0
    expert_count: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        if self.experts and not 0 < self.experts_per_token <= self.expert_count:
            raise UserError(
                f"experts_per_token={self.experts_per_token}: allowed are 1 to {self.expert_count}, the routed experts"
            )

    @property
    def active(self) -> float:
        """Parameters that compute for one token."""
        return self.read + self.experts_touched(1)

    def experts_touched(self, batch: int) -> float:
        """Expert parameters that a step of `batch` tokens reads: the expected share, if routing were uniform."""
        if not self.experts:
            return 0.0
        missed: float = (1 - self.experts_per_token / self.expert_count) ** batch
        return self.experts * (1 - missed)

    def changed_by(self, difference: int) -> Weights:
        """After `difference` parameters more (or less) in attention."""
        return replace(self, total=self.total + difference, read=self.read + difference)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model as the planner sees it.

    longest: the longest context it was made for, None: unknown.  notes: what the numbers leave out.
    """

    name: str
    d_model: int
    layers: tuple[Layer, ...]
    weights: Weights
    longest: int | None = None
    notes: tuple[str, ...] = ()
