"""The parts that both models are made of: feed-forward, residual block, stack of blocks, initial values.

A block reads: norm -> attend -> add; norm -> attend to memory -> add; norm -> feed-forward -> add (pre-norm), or the
same with the norm after the sum (post-norm), or attention and feed-forward side by side (parallel residual). Nothing
here knows which variant attends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Attention
from ..geometry import Geometry
from ..positions import POSITIONS
from ..spec import AttentionSpec
from ..streams import PADDING, Stream, StreamCache, cache_elements
from .config import _Config

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
}
"""Activations without a gate."""


class FeedForward(nn.Module):
    """E -> d_ff -> E with ReLU or GELU, or SwiGLU (arXiv 2002.05202), whose gate makes it three matrices.

    "gelu-tanh" is the approximation of GELU that GPT-2 was trained with (arXiv 1606.08415, section 2).
    """

    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.activation, self.rate = config.activation, config.dropout
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=config.ff_bias)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=config.ff_bias)
        if config.activation == "swiglu":
            self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=config.ff_bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        hidden = F.silu(self.gate_proj(x)) * up if self.activation == "swiglu" else PLAIN[self.activation](up)
        y: Tensor = self.down_proj(hidden)
        return y


def norm(config: _Config) -> nn.Module:
    kind, default = (nn.LayerNorm, 1e-5) if config.norm_type == "layer" else (nn.RMSNorm, 1e-6)
    return kind(config.d_model, eps=default if config.norm_eps is None else config.norm_eps)


@dataclass
class Memory:
    """The encoder's output as the decoder keeps it: the cross-attention streams of each layer, once per source.

    positions: (B, S), -1 for padding.  streams: per decoder layer, name -> (B, G, S, W).
    """

    positions: Tensor
    streams: Sequence[Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(s.numel() * s.element_size() for layer in self.streams for s in layer.values())

    def geometry(self, queries: int) -> Geometry:
        """For `queries` rows per source: beams of a source are further queries, never copies of its streams."""
        q_pos = torch.zeros(1, queries, dtype=torch.int32, device=self.positions.device)
        return Geometry(q_pos, self.positions, causal=False)

    def select(self, rows: Tensor) -> Memory:
        """The memory of these sources only."""
        streams = [{n: s.index_select(0, rows) for n, s in layer.items()} for layer in self.streams]
        return Memory(self.positions.index_select(0, rows), streams)


@dataclass
class Watched:
    """What a forward pass was asked to keep: attention weights (B, H, M, T) and hidden states, layer by layer.

    hidden: the input of the first layer, then the output of every layer, before the last norm.
    keep_weights: weights come from the reference kernel; without them the usual kernel runs.
    """

    keep_weights: bool = True
    self_weights: list[Tensor] = field(default_factory=list)
    cross_weights: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


class Block(nn.Module):
    """One Transformer layer."""

    def __init__(self, config: _Config, spec: AttentionSpec, cross: AttentionSpec | None, borrows: bool) -> None:
        super().__init__()
        self.pre, self.rate, self.parallel = config.norm == "pre", config.dropout, config.parallel_residual
        self.self_attn = Attention(spec, borrows=borrows)
        self.self_norm = norm(config)
        if cross is not None:
            self.cross_attn: Attention = Attention(cross)
            self.cross_norm = norm(config)
        self.ff = FeedForward(config)
        self.ff_norm = norm(config)

    def forward(
        self,
        x: Tensor,
        geometry: Geometry,
        *,
        cache: StreamCache | None,
        layer: int,
        lent: Mapping[str, Tensor] | None,
        memory: tuple[Mapping[str, Tensor], Geometry] | None,
        watched: Watched | None,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """x (B, M, E) -> the same shape, and the streams this layer attended over."""
        weights = watched is not None and watched.keep_weights
        y, streams, a = self.self_attn.over_past(
            self._before(x, self.self_norm),
            geometry,
            cache=cache,
            layer=layer,
            lent=lent,
            weights=weights,
        )
        entered = x
        x = self._add(x, y, self.self_norm)
        if watched is not None and a is not None:
            watched.self_weights.append(a)
        if memory is not None:
            y, a = self.cross_attn.over_memory_with_weights(self._before(x, self.cross_norm), *memory, weights=weights)
            x = self._add(x, y, self.cross_norm)
            if watched is not None and a is not None:
                watched.cross_weights.append(a)
        read = entered if self.parallel else x
        x = self._add(x, self.ff(self._before(read, self.ff_norm)), self.ff_norm)
        if watched is not None:
            watched.hidden.append(x)
        return x, streams

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x) if self.pre else x

    def _add(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        x = x + F.dropout(y, self.rate, self.training)
        return x if self.pre else norm(x)


class Stack(nn.Module):
    """Layers over one embedding, with the absolute position of their scheme and a last norm (pre-norm only).

    specs: attention of each layer, from bottom to top; cross: the same for attention to a memory.
    share_every: layer l reuses the streams of layer l - l % share_every.
    """

    main_input_name = "input_ids"
    """transformers asks a model's encoder for it."""

    def __init__(
        self,
        config: _Config,
        specs: Sequence[AttentionSpec],
        cross: Sequence[AttentionSpec] | None = None,
        share_every: int = 1,
    ) -> None:
        super().__init__()
        self.spec, self.rate, self.share_every = specs[0], config.dropout, share_every
        self.input_scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
        position = specs[0].position
        self.position_embedding = POSITIONS[position.kind].embedding(config.d_model, position.options)
        self.layers = nn.ModuleList(
            Block(config, spec, cross[i] if cross else None, i % share_every != 0) for i, spec in enumerate(specs)
        )
        self.last_norm = norm(config) if config.norm == "pre" else nn.Identity()

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        *,
        cache: StreamCache | None = None,
        memory: Memory | None = None,
        watched: Watched | None = None,
    ) -> Tensor:
        """embedded (B, M, E), positions (B, M) with -1 for padding -> hidden states (B, M, E).

        cache: receives the new tokens in every layer; its owner calls nothing else.
        """
        x = embedded * self.input_scale
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions).to(x.dtype)
        x = F.dropout(x, self.rate, self.training)
        if watched is not None:
            watched.hidden.append(x)
        if cache is not None:
            cache.advance(positions)
        k_pos = positions if cache is None else cache.positions
        geometry = Geometry(positions, k_pos, causal=self.spec.causal, window=self.spec.window)
        over = None
        if memory is not None:
            over = memory.geometry(x.shape[0] // memory.positions.shape[0] * x.shape[1])
        lent: Mapping[str, Tensor] | None = None
        for i, block in enumerate(self.blocks()):
            pair = None if memory is None or over is None else (memory.streams[i], over)
            x, streams = block(x, geometry, cache=cache, layer=i, lent=lent, memory=pair, watched=watched)
            if i % self.share_every == 0:
                lent = streams
        y: Tensor = self.last_norm(x)
        return y

    def blocks(self) -> Iterator[Block]:
        """The layers from bottom to top."""
        for block in self.layers:
            assert isinstance(block, Block)
            yield block

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer, from bottom to top."""
        return tuple(block.self_attn.spec for block in self.blocks())

    @property
    def cache_layers(self) -> list[tuple[Stream, ...] | int]:
        """Per layer its streams, or the index of the layer it shares them with."""
        every = self.share_every
        return [spec.streams if i % every == 0 else i - i % every for i, spec in enumerate(self.specs)]

    @property
    def cache_elements_per_token(self) -> int:
        """Elements cached per token over all layers, shared streams counted once."""
        return sum(cache_elements(layer) for layer in self.cache_layers if not isinstance(layer, int))


def positions_of(mask: Tensor) -> Tensor:
    """Positions (B, T) int32 from a mask (B, T) of real tokens: counted per row, -1 at padding, on either side."""
    mask = mask.to(torch.int32)
    return torch.where(mask > 0, mask.cumsum(dim=1, dtype=torch.int32) - 1, PADDING)


def initialise(model: nn.Module, seed: int) -> None:
    """Set every parameter from (seed, name of its module): equal across variants wherever name and shape agree.

    So the difference between two variants of one seed is a paired one. Matrices are Xavier uniform, embeddings normal
    with deviation E^-1/2 (the padding row zero), everything else as its module's `reset_parameters` says.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module in model.named_modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
                if module.padding_idx is not None:
                    module.weight[module.padding_idx].zero_()
            else:
                module.reset_parameters()  # every module of ours that owns parameters has one
