"""One decoding step of a stack of blocks, with as little around the maths as possible.

The maths is the model's own: variants project, position schemes give tables and rotations, kernels attend; what is
written here once more is the order of a block's parts. Tests hold it equal to `Stack.forward`.
Must never read or move the past but through the kernel, and is for inference only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Attention
from ..geometry import Geometry
from ..kernels import attend, choose
from ..kernels.cpu import attend_cpu
from ..models.block import Block, Memory, Stack
from ..positions import DistanceTables, Position, Rotation
from ..positions.absolute import LearnedEmbedding
from ..quantised import all_dense
from ..streams import StreamCache
from ..variants import Terms
from .lean import Linear, join_maps_of_input, lean


class StepGeometry(Geometry):
    """Geometry of a causal step whose position range is known, so that nothing is worked out from tensors.

    last: the largest position of a query; none of them is padding.  plain: all rows stand at position `last`, with one
    new token and nothing but real tokens in the past, so that everything is visible.
    """

    def __init__(self, q_pos: Tensor, k_pos: Tensor, *, window: int | None, last: int, plain: bool) -> None:
        super().__init__(q_pos, k_pos, causal=True, window=window)
        self.last, self._plain = last, plain
        facts: dict[str, Any] = {"delta_range": (0, last)}
        if plain:
            facts |= {"offset": last}
            if window is None or last < window:
                facts |= {"visible": None, "hidden": None, "seeing": None}
        self.__dict__.update(facts)

    def _windowed(self, window: int | None) -> StepGeometry:
        return StepGeometry(self.q_pos, self.k_pos, window=window, last=self.last, plain=self._plain)


class LeanAttention:
    """Attention of one layer: projections joined where they share their input, facts looked up once."""

    def __init__(self, attention: Attention, *, over_memory: bool = False) -> None:
        self.variant = lean(attention.variant)
        self.position: Position = attention.position
        self.window = attention.spec.window
        self.borrows, self.impl = attention.borrows, attention.impl
        self.scale = attention.variant.scale
        self.may_absorb = attention.can_absorb and attention.route != "expand"
        self.must_absorb = attention.can_absorb and attention.route == "absorb"
        self._tables: DistanceTables | None = None
        self._reach = -1
        self._direct: bool | None = None
        if not over_memory and not self.borrows:
            join_maps_of_input(self.variant, self._project, attention.spec.d_model)

    def _project(self, x: Tensor) -> None:
        self.variant.entries(x, None)
        self.variant.queries(x, None)

    def tables(self, geometry: Geometry) -> DistanceTables | None:
        """Tables that cover the geometry's distances; for steps they reach twice as far and are kept."""
        if not self.position.has_tables:
            return None
        low, high = geometry.delta_range
        if low < 0:
            return self.position.tables(low, high, device=geometry.q_pos.device)
        if high > self._reach:
            self._reach = max(128, 2 * high)
            self._tables = self.position.tables(0, self._reach, device=geometry.q_pos.device)
        return self._tables

    def attend(
        self, q: Mapping[str, Tensor], streams: Mapping[str, Tensor], geometry: Geometry, rotation: Rotation | None
    ) -> Tensor:
        """Queries over streams -> (B, M, E)."""
        M, T = geometry.q_pos.shape[1], geometry.k_pos.shape[1]
        absorb = self.must_absorb or (self.may_absorb and M < T)
        if self.variant.two_routes and not absorb:
            streams = all_dense(streams)
        terms: Terms = (self.variant.absorb if absorb else self.variant.expand)(q, streams, rotation)
        tables = self.tables(geometry)
        if M == 1 and self._goes_direct(terms, tables):
            o = attend_cpu(terms.scores, terms.value, geometry, scale=self.scale, tables=tables)
            if terms.value.lift is not None:
                o = torch.einsum("bhmw,hwd->bhmd", o, terms.value.lift)
        else:
            o = attend(terms.scores, terms.value, geometry, scale=self.scale, tables=tables, impl=self.impl)
        return self.variant.output(o)

    def _goes_direct(self, terms: Terms, tables: DistanceTables | None) -> bool:
        """Whether single queries go to the native kernel; asked once, since every step asks for the same."""
        if self._direct is None:
            chosen = choose(self.impl, terms.scores, terms.value, tables=tables).impl
            self._direct = chosen == "cpu"
            return False  # through the front door once, which checks the request
        return self._direct


class LeanLayer:
    """A block ready for steps."""

    def __init__(self, block: Block) -> None:
        twin = lean(block)
        self.pre, self.parallel = block.pre, block.parallel
        self.attention = LeanAttention(block.self_attn)
        self.cross = LeanAttention(block.cross_attn, over_memory=True) if hasattr(block, "cross_attn") else None
        self.self_norm, self.ff_norm, self.ff = twin.self_norm, twin.ff_norm, twin.ff.forward
        self.ff_maps = join_maps_of_input(twin.ff, twin.ff.forward, block.self_attn.spec.d_model)
        self.turn = 0
        self.cross_norm: Callable[[Tensor], Tensor] | None = twin.cross_norm if self.cross else None


class LeanStack:
    """A decoder's stack with its embedding and output table: ids in, logits of the newest token out.

    embedding, output: (V, E).
    """

    def __init__(self, stack: Stack, embedding: Tensor, output: Tensor) -> None:
        self.layers = [LeanLayer(block) for block in stack.blocks()]
        self.window = stack.spec.window
        self.scale, self.embedding, self.position_embedding = stack.input_scale, embedding, stack.position_embedding
        schemes = {block.self_attn.spec.position: block.self_attn.position for block in stack.blocks()}
        self.positions: list[Position] = list(schemes.values())
        for layer, block in zip(self.layers, stack.blocks(), strict=True):
            layer.turn = list(schemes).index(block.self_attn.spec.position)
        self.last_norm = lean(stack).last_norm
        self.output = Linear(output, None)
        self._ahead = torch.empty(0)
        self._seen: tuple[Memory, int, Geometry] | None = None

    def lay_out(self, rows: int) -> None:
        """Keep the large matrices as steps of this many rows read them fastest."""
        for linear in (self.output, *[m for layer in self.layers for m in layer.ff_maps]):
            linear.lay_out(rows)

    def step(self, ids: Tensor, geometry: Geometry, cache: StreamCache, memory: Memory | None = None) -> Tensor:
        """New ids (B, M), geometry over a cache that has been advanced -> logits (B, V) of the newest token."""
        x = F.embedding(ids, self.embedding) * self.scale
        if self.position_embedding is not None:
            x = x + self._absolute(self.position_embedding, geometry).to(x.dtype)
        turns = [(p.rotation(geometry.q_pos), p.rotation(geometry.k_pos)) for p in self.positions]
        over = None if memory is None else self._over(memory, ids.numel())
        for i, layer in enumerate(self.layers):
            own = layer.attention
            q_turn, k_turn = turns[layer.turn]
            h = layer.self_norm(x) if layer.pre else x
            if not own.borrows:
                cache.write(i, own.variant.entries(h, q_turn))
            y = own.attend(own.variant.queries(h, q_turn), cache.read(i), geometry.with_window(own.window), k_turn)
            entered, x = x, x + y if layer.pre else layer.self_norm(x + y)
            if memory is not None and over is not None:
                x = self._over_memory(x, layer, memory.streams[i], over)
            y = layer.ff(layer.ff_norm(entered if layer.parallel else x) if layer.pre else x)
            x = x + y if layer.pre else layer.ff_norm(x + y)
        return self.output(self.last_norm(x[:, -1]))

    def _absolute(self, embedding: nn.Module, geometry: Geometry) -> Tensor:
        """What absolute positions add to the embedding; for steps looked up in a table made ahead."""
        if not isinstance(geometry, StepGeometry):
            added: Tensor = embedding.forward(geometry.q_pos)
            return added
        if geometry.last >= self._ahead.shape[0]:
            limit = embedding.weight.shape[0] if isinstance(embedding, LearnedEmbedding) else 2 * geometry.last
            reach = max(geometry.last + 1, min(limit, max(64, 2 * geometry.last)))
            every = torch.arange(reach, dtype=torch.int32, device=geometry.q_pos.device)
            self._ahead = embedding.forward(every[None])[0]
        return F.embedding(geometry.q_pos, self._ahead)

    def _over(self, memory: Memory, queries: int) -> Geometry:
        """The geometry of a step over a memory, the same for all steps over it."""
        if self._seen is None or self._seen[0] is not memory or self._seen[1] != queries:
            self._seen = memory, queries, memory.geometry(queries // memory.positions.shape[0])
        return self._seen[2]

    @staticmethod
    def _over_memory(x: Tensor, layer: LeanLayer, streams: Mapping[str, Tensor], over: Geometry) -> Tensor:
        assert layer.cross is not None and layer.cross_norm is not None
        h = layer.cross_norm(x) if layer.pre else x
        beams = h.view(over.k_pos.shape[0], -1, h.shape[-1])
        y = layer.cross.attend(layer.cross.variant.queries(beams, None), streams, over, None).view(x.shape)
        return x + y if layer.pre else layer.cross_norm(x + y)
