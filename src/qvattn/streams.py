"""Streams: the per-token tensors that attention keeps, how they are read, and the cache that holds them.

Everything cached is a stream `S_s` of shape (B, G, T, W). A score or a value reads a *view* of a stream. Cache
bytes, beam reorder, rollback and the kernels are written once, over streams. Queries, scores and past outputs are
never stored: they occur in no later step.

Shape letters (used in the whole package):
    B batch, H query heads, G shared heads of a stream, M query length, T key length,
    D head size, W stream width, C context size, R latent rank, E model width.

This module knows nothing of variants, position schemes or models.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from .errors import UserError
from .quantised import QuantisedStream, quantise

SCALE = " scale"
"""Suffix of the buffer that holds the scales of an int8 stream, (B, G, capacity, 1) float32."""
PADDING = -1
"""The position of a padding token: visible to nobody."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One cached tensor per token: `heads` x `width` elements, taking part in the score, the value, or both."""

    name: str
    heads: int
    width: int
    scores: bool = False
    values: bool = False

    @property
    def elements(self) -> int:
        """Elements cached per token and layer."""
        return self.heads * self.width

    @property
    def role(self) -> str:
        return "+".join(r for r, on in (("S", self.scores), ("V", self.values)) if on)

    def __str__(self) -> str:
        return f"{self.name} ({self.heads}x{self.width}, {self.role})"


def cache_elements(streams: Sequence[Stream]) -> int:
    """Elements cached per token and layer (DESIGN 2.1, last column)."""
    return sum(s.elements for s in streams)


class StreamCache:
    """Streams of all layers of a decoder, preallocated and growing by doubling.

    The owner of the model calls `advance(positions)` once per step; every layer then `write`s its new entries and
    `read`s all of them. Entries never change after they are written; `crop`, `reorder` and `fork` are explicit.
    For inference: entries are stored detached. Buffers are ordinary tensors even when they are made in inference
    mode, so that a cache filled there can go on outside.

    layers: one entry per layer: its streams, or the index of an earlier layer whose streams it shares.
    batch_size: rows B.  capacity: tokens to reserve at first.  device: of the stored entries.
    dtype: of the stored entries; int8 quantises them on `write`, one float32 scale per token and head, and `read` then
        gives `QuantisedStream`s.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        layers: Sequence[Sequence[Stream] | int],
        batch_size: int,
        *,
        capacity: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size}: a cache needs at least one row")
        self.dtype, self.device = dtype, torch.device(device)
        self.batch_size, self.length = batch_size, 0
        self._capacity = max(1, capacity)
        self._owner = [i if not isinstance(s, int) else s for i, s in enumerate(layers)]
        self.streams = [s for s in layers if not isinstance(s, int)]
        for i, owner in enumerate(self._owner):
            if not 0 <= owner <= i or self._owner[owner] != owner:
                raise UserError(f"layer {i} shares the streams of layer {owner}, which must be an earlier owner")
        self._positions = torch.full((batch_size, self._capacity), PADDING, dtype=torch.int32, device=self.device)
        self._layers: dict[int, dict[str, Tensor]] = {
            i: {s.name: self._allocate(s.heads, s.width, dtype) for s in layer}
            for i, layer in enumerate(layers)
            if not isinstance(layer, int)
        }
        if dtype is torch.int8:
            for buffers in self._layers.values():
                scales = {n + SCALE: self._allocate(b.shape[1], 1, torch.float32) for n, b in buffers.items()}
                buffers.update(scales)
        self._spares: dict[Hashable, Tensor] = {}

    def _allocate(self, heads: int, width: int, dtype: torch.dtype) -> Tensor:
        # not zeroed: nothing beyond the used length is ever read
        return torch.empty(self.batch_size, heads, self._capacity, width, dtype=dtype, device=self.device)

    @property
    def positions(self) -> Tensor:
        """Positions of the cached tokens, (B, T) int32, padding -1."""
        return self._positions[:, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of the cached stream entries: batch x length x elements x item size, shared layers counted once.

        With int8 also the scales: 4 bytes per token, row and shared head.

        The token positions (4 bytes a token and row, once for all layers) are not streams and not counted.
        """
        return sum(b[:, :, : self.length].numel() * b.element_size() for b in self._buffers())

    @property
    def allocated_nbytes(self) -> int:
        """Bytes reserved for stream entries.

        At most twice `nbytes` once the first reservation is full, and after a `reorder` one buffer more of each shape.
        """
        return sum(b.untyped_storage().nbytes() for b in (*self._buffers(), *self._spares.values()))

    def _buffers(self) -> list[Tensor]:
        return [b for layer in self._layers.values() for b in layer.values()]

    def next_positions(self, count: int) -> Tensor:
        """Positions (B, count) that continue each row after its last real token."""
        if self.length == 0:
            start = torch.zeros(self.batch_size, 1, dtype=torch.int32, device=self.device)
        else:
            start = self.positions.amax(dim=1, keepdim=True) + 1
        return start + torch.arange(count, dtype=torch.int32, device=self.device)

    @torch.inference_mode(False)
    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens; doubles, so that appending costs constant time on average."""
        if capacity <= self._capacity:
            return
        self._capacity = max(capacity, 2 * self._capacity)
        self._spares.clear()
        for layer in self._layers.values():
            for name, buffer in layer.items():
                grown = self._allocate(buffer.shape[1], buffer.shape[3], buffer.dtype)
                grown[:, :, : self.length] = buffer[:, :, : self.length]
                layer[name] = grown
        positions = torch.full((self.batch_size, self._capacity), PADDING, dtype=torch.int32, device=self.device)
        positions[:, : self.length] = self.positions
        self._positions = positions

    def advance(self, positions: Tensor) -> None:
        """Begin a step of M tokens: positions (B, M), -1 for padding. Every layer then writes its M entries."""
        if positions.shape[0] != self.batch_size:
            raise UserError(f"positions have {positions.shape[0]} rows, the cache has {self.batch_size}")
        count = positions.shape[1]
        self.reserve(self.length + count)
        self._positions[:, self.length : self.length + count] = positions
        self.length += count

    def write(self, layer: int, entries: Mapping[str, Tensor]) -> None:
        """Store the entries (B, G, M, W) of the newest M tokens of `layer`. The past is neither read nor moved."""
        buffers = self._layers[layer]
        with torch.no_grad():
            for name, entry in entries.items():
                new = slice(self.length - entry.shape[2], self.length)
                if self.dtype is torch.int8:
                    small = quantise(entry)
                    buffers[name][:, :, new] = small.data
                    buffers[name + SCALE][:, :, new, 0] = small.scale
                else:
                    buffers[name][:, :, new] = entry

    def read(self, layer: int) -> dict[str, Any]:
        """All entries of `layer` (or of the layer it shares with): name -> (B, G, T, W), views without a copy.

        Tensors, or with dtype int8 `QuantisedStream`s.
        """
        used = {name: b[:, :, : self.length] for name, b in self._layers[self._owner[layer]].items()}
        if self.dtype is not torch.int8:
            return used
        return {n: QuantisedStream(b, used[n + SCALE][..., 0]) for n, b in used.items() if n + SCALE in used}

    def owns(self, layer: int) -> bool:
        """Whether `layer` writes streams of its own."""
        return self._owner[layer] == layer

    @torch.inference_mode(False)
    def reorder(self, index: Tensor) -> None:
        """Row b becomes a copy of old row index[b]; the number of rows may change (beam search).

        Copies the used length only, into a buffer that the previous reorder left over where there is one; the identity
        copies nothing.
        """
        index = index.to(self.device)
        rows = int(index.numel())
        if rows == self.batch_size and torch.equal(index, torch.arange(rows, dtype=index.dtype, device=self.device)):
            return
        for layer in self._layers.values():
            for name, buffer in layer.items():
                layer[name] = self._selected(buffer, index)
        self._positions = self._positions.index_select(0, index)
        self.batch_size = rows

    def _selected(self, buffer: Tensor, index: Tensor) -> Tensor:
        """The rows `index` of a buffer, in the spare buffer of its shape; `buffer` becomes the next spare."""
        kind, rows = (buffer.dtype, *buffer.shape[1:]), int(index.numel())
        spare = self._spares.get(kind)
        if spare is None or spare.shape[0] < rows:
            spare = buffer.new_empty(rows, *buffer.shape[1:])
        self._spares[kind] = buffer
        chosen = spare[:rows]
        torch.index_select(buffer[:, :, : self.length], 0, index, out=chosen[:, :, : self.length])
        return chosen

    def crop(self, length: int) -> None:
        """Forget every token from `length` on (rollback); the remaining entries stay as they are."""
        if not 0 <= length <= self.length:
            raise UserError(f"length={length}: allowed 0 to {self.length}, the tokens in the cache")
        self._positions[:, length : self.length] = PADDING
        self.length = length

    @torch.inference_mode(False)
    def fork(self) -> Self:
        """An independent copy: two continuations of one prefix do not see each other."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._layers = {i: {n: self._copied(b) for n, b in layer.items()} for i, layer in self._layers.items()}
        twin._positions = self._positions.clone()
        twin._spares = {}
        return twin

    def _copied(self, buffer: Tensor) -> Tensor:
        copy = torch.empty_like(buffer)
        copy[:, :, : self.length] = buffer[:, :, : self.length]
        return copy
