"""Bytes and operations of decoding, and how fast a roofline allows it to be. Arithmetic only, no model is run.

step: one new token in each of `batch` rows, every row at the end of `context` cached tokens
bytes of a step = weights read once + what each row reads of its cache and states + what it writes
operations of a token = 2 per active parameter outside attention + attention (counted on the operations themselves)
time of a step >= max(bytes / bandwidth, operations / peak)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...errors import UserError
from ...spec import AttentionSpec
from .hardware import Hardware
from .layers import Layer, Weights

STATE_FLOPS = 6
"""Per element of a recurrent state and token: decay or correct, add the new outer product, read with the query."""
STATE_LEAST = 2
"""Bytes of an element of a constant state, at least."""
FAR = 1 << 40
"""Tokens from which a context counts as unlimited."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Rows and tokens, and in which types. source: tokens of the encoder's input, where there is one."""

    context: int
    batch: int
    source: int | None = None
    cache_dtype: torch.dtype = torch.bfloat16
    weights_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.context < 0:
            raise UserError(f"context={self.context}: allowed are 0 or more tokens")
        if self.batch < 1:
            raise UserError(f"batch={self.batch}: allowed are 1 or more rows")

    def tokens(self, layer: Layer, context: int | None = None) -> int:
        """Tokens that `layer` attends over, without a window: of the source or of the decoder."""
        here = self.context if context is None else context
        return here if self.source is None or not layer.over_source else self.source


def bytes_per_token(layers: Sequence[Layer], dtype: torch.dtype) -> int:
    """Bytes that one more token costs in one row, as long as no window is full."""
    return sum(layer.stored_bytes(dtype) for layer in layers if not layer.over_source)


def layer_cache_bytes(layer: Layer, work: Workload, context: int | None = None) -> int:
    """Bytes that one row stores in `layer`."""
    tokens = layer.kept(work.tokens(layer, context)) * layer.stored_bytes(work.cache_dtype)
    return tokens + state_bytes(layer, work.cache_dtype)


def state_bytes(layer: Layer, dtype: torch.dtype) -> int:
    """Constant bytes of one row in `layer`; int8 is for entries per token, so states then stay in 16 bit."""
    size = max(dtype.itemsize, STATE_LEAST)
    return sum(s.elements * (s.itemsize or size) for s in layer.states)


def row_cache_bytes(layers: Sequence[Layer], work: Workload, context: int | None = None) -> int:
    """Bytes that one row stores over all layers, at `context` or the workload's own."""
    return sum(layer_cache_bytes(layer, work, context) for layer in layers)


def largest_batch(layers: Sequence[Layer], work: Workload, room: float) -> int | None:
    """Rows whose caches fit into `room` bytes; None where a row stores nothing."""
    row = row_cache_bytes(layers, work)
    return None if row == 0 else max(0, int(room // row))


def longest_context(layers: Sequence[Layer], work: Workload, room: float) -> int | None:
    """Tokens per row at which `batch` rows still fit into `room` bytes; None: no end (constant memory)."""

    def fits(context: int) -> bool:
        return work.batch * row_cache_bytes(layers, work, context) <= room

    return largest(fits)


def largest(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, for a condition that once false stays false; 0 if none, None if there is no end."""
    if not fits(0):
        return 0
    if fits(FAR):
        return None
    low, high = 0, FAR
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@lru_cache(maxsize=4096)
def layer_parameters(spec: AttentionSpec, borrows: bool = False) -> int:
    """Attention parameters of one layer; where it borrows, without what makes streams."""
    return spec.parameters - (_stream_parameters(spec) if borrows else 0)


def _stream_parameters(spec: AttentionSpec) -> int:
    with torch.device("meta"):
        variant = spec.variant_class(spec)
    parts = [part for name in variant.stream_parameters if (part := getattr(variant, name)) is not None]
    return sum(p.numel() for part in parts for p in part.parameters())


@lru_cache(maxsize=4096)
def attention_flops(spec: AttentionSpec, tokens: int, borrows: bool = False) -> int:
    """Operations of one layer's attention for one token over `tokens` tokens, projections included."""
    unmade = 2 * _stream_parameters(spec) if borrows else 0
    return spec.projection_flops_per_token + spec.attention_flops_per_token(tokens) - unmade


@dataclass(frozen=True, kw_only=True)
class Step:
    """One decoding step. Per token where it says so, else of all rows together. attention_flops: a part of flops."""

    flops_per_token: float
    attention_flops_per_token: int
    weight_bytes: float
    cache_bytes_read: int
    cache_bytes_written: int
    batch: int

    @property
    def flops(self) -> float:
        return self.batch * self.flops_per_token

    @property
    def bytes(self) -> float:
        """Read and written, of all rows together."""
        return self.weight_bytes + self.cache_bytes_read + self.cache_bytes_written

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.batch

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    def seconds(self, hardware: Hardware, dtype: torch.dtype) -> tuple[float, str]:
        """The least time it can take, and which of "memory" and "compute" says so."""
        memory, compute = self.bytes / hardware.bandwidth, self.flops / hardware.peak(dtype)
        return (memory, "memory") if memory >= compute else (compute, "compute")


def decode_step(layers: Sequence[Layer], weights: Weights, work: Workload) -> Step:
    """What one step costs. `weights` are those of a model with exactly these layers."""
    attention = attention_parameters = unread = read = written = state_flops = 0
    for layer in layers:
        if layer.spec is not None:
            tokens = work.tokens(layer)
            makes_none = layer.borrows or layer.over_source  # cross-attention streams are made once per source
            attention += attention_flops(layer.spec, tokens, makes_none)
            attention_parameters += layer_parameters(layer.spec, layer.borrows)
            read += layer.spec.tokens_read(tokens) * layer.read_bytes(work.cache_dtype)
            written += 0 if layer.over_source else layer.stored_bytes(work.cache_dtype)
            unread += _stream_parameters(layer.spec) if layer.over_source else 0
        read += state_bytes(layer, work.cache_dtype)
        written += state_bytes(layer, work.cache_dtype)
        state_flops += sum(STATE_FLOPS * s.elements for s in layer.states if s.recurrent)
    rest = max(0.0, weights.active - attention_parameters)
    return Step(
        flops_per_token=2 * rest + attention + state_flops,
        attention_flops_per_token=attention,
        weight_bytes=(weights.read - unread + weights.experts_touched(work.batch)) * work.weights_dtype.itemsize,
        cache_bytes_read=work.batch * read,
        cache_bytes_written=work.batch * written,
        batch=work.batch,
    )
