"""Attention: project -> cache.write -> attend -> output, for every variant and position scheme.

This module is the only place where the three meet. It never branches on the name of a variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .errors import UserError
from .geometry import Geometry
from .kernels import attend, attend_with_weights
from .positions import POSITIONS, DistanceTables, Rotation
from .quantised import all_dense
from .spec import AttentionSpec
from .streams import StreamCache

Route = Literal["auto", "expand", "absorb"]
FEW_QUERIES = 16
"""Up to this many new tokens, folding factors into the queries beats rebuilding all keys."""


class Attention(nn.Module):
    """Attention over streams, as `spec` says.

    borrows: this layer reuses the streams of an earlier layer and makes none of its own.
    route: "expand" materialises keys and values, "absorb" folds their factors into queries and output; "auto" absorbs
        when a few new tokens meet a longer past, without gradients. Both give the same numbers.
    impl: the kernel, see `qvattn.attend`.

    Raises UserError for a route the spec does not allow.
    """

    def __init__(
        self, spec: AttentionSpec, *, borrows: bool = False, route: Route = "auto", impl: str = "auto"
    ) -> None:
        super().__init__()
        self.spec, self.borrows, self.impl = spec, borrows, impl
        self.variant = spec.variant_class(spec)
        self.position = POSITIONS[spec.position.kind](spec.n_heads, spec.causal, spec.position.options)
        self._scheme = spec.position.model_dump_json()  # a plain string: torch.compile reads it
        if borrows:
            for name in self.variant.stream_parameters:
                delattr(self.variant, name)
        self.can_absorb = spec.can_absorb
        if route == "absorb" and self.variant.two_routes and not self.can_absorb:
            raise UserError(
                f"route='absorb': {spec.variant!r} with position {spec.position.kind!r} rotates keys that absorption "
                "folds away; use route='expand' (keys are rebuilt and rotated on read) or another position scheme"
            )
        self.route: Route = route

    def new_cache(
        self,
        batch_size: int = 1,
        *,
        capacity: int = 64,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> StreamCache:
        """An empty cache for this layer alone; dtype and device follow the parameters."""
        like = self.variant.o_proj.weight
        return StreamCache(
            [self.spec.streams],
            batch_size,
            capacity=capacity,
            dtype=dtype or like.dtype,
            device=device or like.device,
        )

    def forward(
        self,
        x: Tensor,
        *,
        memory: Tensor | None = None,
        positions: Tensor | None = None,
        memory_positions: Tensor | None = None,
        cache: StreamCache | None = None,
    ) -> Tensor:
        """x (B, M, E) -> (B, M, E).

        positions: (B, M) integers, -1 for padding; default: continue the cache, or count from 0.
        memory: (B, T, E): cross-attention, queries from x and streams from memory; no causality, window or relative
            position. memory_positions: (B, T), -1 for padding.
        cache: holds the past and receives the new entries; the caller owns it.
        """
        if x.dim() != 3 or x.shape[-1] != self.spec.d_model:
            raise UserError(f"x has shape {tuple(x.shape)}, expected [B, M, E={self.spec.d_model}]")
        B, M, _ = x.shape
        if memory is not None:
            if cache is not None:
                raise UserError("cache: cross-attention keeps the streams of its memory; use `memory_streams` once")
            geometry = memory_geometry(memory, memory_positions, M)
            return self.over_memory(x, self.memory_streams(memory), geometry)
        if cache is None:
            if positions is None:
                geometry = Geometry.contiguous(M, causal=self.spec.causal, window=self.spec.window, device=x.device)
            else:
                geometry = Geometry(positions, positions, causal=self.spec.causal, window=self.spec.window)
            return self.over_past(x, geometry)[0]
        if not self.spec.causal:
            raise UserError("cache: a bidirectional layer has no past to keep; set causal=True")
        if cache.batch_size != B:
            raise UserError(f"x has {B} rows, the cache has {cache.batch_size}; reorder the cache first")
        cache.advance(cache.next_positions(M) if positions is None else positions)
        geometry = Geometry(cache.positions[:, -M:], cache.positions, causal=self.spec.causal, window=self.spec.window)
        return self.over_past(x, geometry, cache=cache)[0]

    def over_past(
        self,
        x: Tensor,
        geometry: Geometry,
        *,
        cache: StreamCache | None = None,
        layer: int = 0,
        lent: Mapping[str, Tensor] | None = None,
        weights: bool = False,
    ) -> tuple[Tensor, Mapping[str, Tensor], Tensor | None]:
        """Self-attention inside a model that has advanced the cache and built the geometry for all its layers.

        lent: the streams of the earlier layer this one borrows from (without a cache).
        Returns y (B, M, E), the streams attended over, and the weights (B, H, M, T) if asked for.
        """
        geometry = geometry.with_window(self.spec.window)
        q_rotation = geometry.recall(("q", self._scheme), lambda: self.position.rotation(geometry.q_pos))
        k_rotation = geometry.recall(("k", self._scheme), lambda: self.position.rotation(geometry.k_pos))
        if self.borrows:
            streams = lent if cache is None else cache.read(layer)
            if streams is None:
                raise UserError("lent: a layer that borrows streams needs them")
        elif cache is None:
            streams = self.variant.entries(x, k_rotation)
        else:
            cache.write(layer, self.variant.entries(x, q_rotation))
            streams = cache.read(layer)
        tables = self.position.tables(*geometry.delta_range, device=x.device) if self.position.has_tables else None
        q = self.variant.queries(x, q_rotation)
        y, a = self._attend(q, streams, geometry, k_rotation, tables, weights)
        return y, streams, a

    def memory_streams(self, memory: Tensor) -> dict[str, Tensor]:
        """The streams of a memory (B, T, E), computed once per source."""
        return self.variant.entries(memory, None)

    def over_memory(self, x: Tensor, streams: Mapping[str, Tensor], geometry: Geometry) -> Tensor:
        """Cross-attention of x (B * k, M, E) over the streams of B sources; k rows (beams) share a source.

        The beams of a source become further queries of its row, so nothing is repeated in memory.
        """
        return self.over_memory_with_weights(x, streams, geometry, weights=False)[0]

    def over_memory_with_weights(
        self, x: Tensor, streams: Mapping[str, Tensor], geometry: Geometry, *, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As `over_memory`, with the weights (B * k, H, M, T) if asked for."""
        rows, M, E = x.shape
        sources = geometry.k_pos.shape[0]
        beams = x.reshape(sources, (rows // sources) * M, E)
        y, a = self._attend(self.variant.queries(beams, None), streams, geometry, None, None, weights)
        if a is not None:
            a = a.unflatten(2, (rows // sources, M)).transpose(1, 2).flatten(0, 1)
        return y.reshape(rows, M, E), a

    def _attend(
        self,
        q: Mapping[str, Tensor],
        streams: Mapping[str, Tensor],
        geometry: Geometry,
        k_rotation: Rotation | None,
        tables: DistanceTables | None,
        weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        M, T = geometry.q_pos.shape[1], geometry.k_pos.shape[1]
        few = M <= FEW_QUERIES < T and not torch.is_grad_enabled()
        absorb = self.can_absorb and (self.route == "absorb" or (self.route == "auto" and few))
        if self.variant.two_routes and not absorb:
            streams = all_dense(streams)  # they are computed with here; elsewhere kernels read them as they are
        terms = (self.variant.absorb if absorb else self.variant.expand)(q, streams, k_rotation)
        dropout = self.spec.dropout if self.training else 0.0
        common: dict[str, Any] = {"scale": self.variant.scale, "tables": tables, "dropout": dropout}
        if weights:
            o, a = attend_with_weights(terms.scores, terms.value, geometry, **common)
        else:
            o, a = attend(terms.scores, terms.value, geometry, impl=self.impl, **common), None
        return self.variant.output(o), a


def memory_geometry(memory: Tensor, positions: Tensor | None, queries: int) -> Geometry:
    """Geometry of `queries` rows over a memory (B, T, E): every query sees every real token."""
    B, T, _ = memory.shape
    if positions is None:
        positions = torch.arange(T, dtype=torch.int32, device=memory.device).expand(B, T)
    q_pos = torch.zeros(B, queries, dtype=torch.int32, device=memory.device)
    return Geometry(q_pos, positions, causal=False)
