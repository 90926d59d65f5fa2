"""One layer of a transformers cache that holds streams instead of keys and values.

It stands in `DynamicCache.layers` in the place of transformers' own layer, so `generate()` finds length, beam reorder
and rollback where it looks for them. Must know nothing of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from ...errors import UserError

ROOM = 64
"""Tokens reserved beyond what is needed, besides an eighth of what is there: growing copies each entry 8 times at most
on average, and never more than an eighth (and this) stands empty."""


class LeanLayer(CacheLayerMixin):
    """The streams of one layer: name -> (B, G, T, W). Entries are stored detached and never change."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True
        self.length = 0
        self._buffers: dict[str, Tensor] = {}

    @property
    def streams(self) -> dict[str, Tensor]:
        """Views of all entries, (B, G, T, W)."""
        return {name: b[:, :, : self.length] for name, b in self._buffers.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the entries."""
        return sum(s.numel() * s.element_size() for s in self.streams.values())

    @property
    def allocated_nbytes(self) -> int:
        """Bytes reserved for entries."""
        return sum(b.untyped_storage().nbytes() for b in self._buffers.values())

    def append(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store the entries (B, G, M, W) of M new tokens; returns all of them (the new ones themselves if first)."""
        count = next(iter(entries.values())).shape[2]
        first = self.length == 0
        with torch.no_grad():
            self._reserve(entries, self.length + count)
            for name, entry in entries.items():
                self._buffers[name][:, :, self.length : self.length + count] = entry
        self.length += count
        return dict(entries) if first else self.streams

    def _reserve(self, entries: Mapping[str, Tensor], needed: int) -> None:
        for name, entry in entries.items():
            old = self._buffers.get(name)
            if old is not None and self.length and old.shape[0] != entry.shape[0]:
                raise UserError(f"the input has {entry.shape[0]} rows, the cache has {old.shape[0]}")
            if old is not None and old.shape[2] >= needed and old.shape[0] == entry.shape[0]:
                continue
            B, G, _, W = entry.shape
            grown = torch.empty(B, G, needed + needed // 8 + ROOM, W, dtype=entry.dtype, device=entry.device)
            if old is not None and self.length:
                grown[:, :, : self.length] = old[:, :, : self.length]
            self._buffers[name] = grown

    # ---- what transformers asks of a layer ------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: buffers are made by the first `append`."""

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError("this cache was filled by a lean model; the model was put back since, start with a new cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = 0
        self._buffers = {}

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise UserError(f"tokens_to_remove={tokens_to_remove}: transformers passes 0 or a negative number")
        self.length = max(0, self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for name, old in self._buffers.items():
            index = beam_idx.to(old.device)
            new = old.new_empty(index.numel(), *old.shape[1:])
            torch.index_select(old[:, :, : self.length], 0, index, out=new[:, :, : self.length])
            self._buffers[name] = new

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = next((b.shape[0] for b in self._buffers.values()), 0)
        self.reorder_cache(torch.arange(rows, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = next((b.shape[0] for b in self._buffers.values()), 0)
        self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    def offload(self) -> None:
        raise UserError("offloading: lean caches stay on the device of their layer")


def self_cache(cache: Cache) -> Cache:
    """The part of a cache that holds the decoder's own past."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def lean_layer(cache: Any, index: int) -> LeanLayer:
    """Layer `index` of a DynamicCache as a LeanLayer; an empty layer of transformers is replaced by one.

    Raises UserError for caches of other kinds, and for layers that an unmodified model has filled.
    """
    cache = self_cache(cache)
    if getattr(cache, "offloading", False) or not isinstance(getattr(cache, "layers", None), list):
        raise UserError(f"cache of type {type(cache).__name__}, offloaded or without layers: use a plain DynamicCache")
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, LeanLayer):
        return layer
    if type(layer) is not DynamicLayer:
        raise UserError(f"cache layer {index} is a {type(layer).__name__}: a lean model works with a DynamicCache")
    if layer.get_seq_length():
        raise UserError(f"cache layer {index} was filled before the model became lean; start with a new cache")
    fresh = LeanLayer()
    cache.layers[index] = fresh
    return fresh


def cache_nbytes(cache: Any) -> int:
    """Bytes of the entries of a whole cache, of lean layers and of transformers' own; what is shared counts once."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_nbytes(cache.self_attention_cache) + cache_nbytes(cache.cross_attention_cache)
    total = 0
    for layer in cache.layers:
        known = getattr(layer, "nbytes", None)
        if known is not None:
            total += known
        elif getattr(layer, "keys", None) is not None:
            total += sum(t.numel() * t.element_size() for t in (layer.keys, layer.values))
    return total
