"""What the cross-attention of all decoder layers shares: the encoder's output, once per source.

transformers stores keys and values of the source per layer and per beam. Here every layer of the cross-attention cache
points to one `Source`; beams and returned sequences of one source share its row.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from ...errors import UserError
from ...geometry import Geometry
from .masks import seen


class Source:
    """Encoder output (S, T, E) of S sources; `beams` consecutive rows of the decoder belong to each.

    states is a view of what the caller passes at every step anyway, until rows are reordered beyond their sources.
    """

    def __init__(self, given: Tensor) -> None:
        self.given: Tensor | None = given
        self.beams = 1 if torch.is_grad_enabled() and given.requires_grad else _run(_same_as_before(given))
        self.states = given[:: self.beams]
        self._geometry: tuple[Any, int, int, Geometry] | None = None

    @property
    def nbytes(self) -> int:
        return self.states.numel() * self.states.element_size()

    def select(self, rows: Tensor) -> None:
        """Decoder row i continues old row rows[i]."""
        source = rows.to(self.states.device) // self.beams
        beams = _run(source[1:] == source[:-1])
        chosen = source[::beams]
        if not torch.equal(chosen, torch.arange(self.states.shape[0], device=chosen.device)):
            self.states, self.given = self.states.index_select(0, chosen), None
        self.beams = beams
        self._geometry = None

    def split(self) -> None:
        """One row for each decoder row, where rows of one source have different masks."""
        self.states, self.beams = self.states.repeat_interleave(self.beams, dim=0), 1

    def geometry(self, mask: Tensor | None, queries: int) -> Geometry:
        """Geometry of beams * M queries over each source; made once for all layers of a step."""
        known = self._geometry
        if known is not None and known[0] is mask and known[1:3] == (queries, self.beams):
            return known[3]
        if mask is None:
            real = torch.ones(1, self.states.shape[1], dtype=torch.bool, device=self.states.device)
        else:
            real = self._real(seen(mask, self.states.shape[1]))
        k_pos = torch.arange(real.shape[1], dtype=torch.int32, device=real.device).expand(real.shape[0], -1)
        q_pos = torch.zeros(1, self.beams * queries, dtype=torch.int32, device=real.device)
        geometry = Geometry(q_pos.expand(real.shape[0], -1), k_pos.masked_fill(~real, -1), causal=False)
        self._geometry = (mask, queries, self.beams, geometry)
        return geometry

    def _real(self, visible: Tensor) -> Tensor:
        """(S or 1, T) bool from (B or 1, 1, M or 1, T): the tokens of each source."""
        rows = visible[:, 0, 0]
        if not torch.equal(visible, rows[:, None, None].expand_as(visible)):
            raise UserError("encoder_attention_mask differs between the queries of a row: not a padding mask")
        if rows.shape[0] == 1:
            return rows
        if self.beams > 1 and not torch.equal(rows, rows[:: self.beams].repeat_interleave(self.beams, dim=0)):
            self.split()
        return rows[:: self.beams]


def _same_as_before(x: Tensor) -> Tensor:
    """(B - 1,) bool: whether each row equals the one before it."""
    return (x[1:] == x[:-1]).flatten(1).all(dim=1)


def _run(same: Tensor) -> int:
    """The largest k such that every k consecutive rows are equal, given which rows equal the one before."""
    ends = [i for i, equal in enumerate(same.tolist(), 1) if not equal]
    return math.gcd(*ends, same.numel() + 1)


class SourceLayer(CacheLayerMixin):
    """One layer of a cross-attention cache. The first one reorders and counts for all that share its source."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, source: Source, owns: bool, module: nn.Module) -> None:
        self.is_initialized = True
        self.source: Source | None = source
        self.owns = owns
        self._module = weakref.ref(module)

    @property
    def keys(self) -> Tensor | None:
        """What transformers would have stored (B, H, T, D), rebuilt: Whisper's `generate` cuts it up."""
        return self._rebuilt("k_proj")

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        return self._rebuilt("v_proj")

    def _rebuilt(self, projection: str) -> Tensor | None:
        module: Any = self._module()
        if module is None or self.source is None:
            return None
        made = getattr(module, projection)(self.source.states).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        rows: Tensor = made.repeat_interleave(self.source.beams, dim=0)
        return rows

    @property
    def nbytes(self) -> int:
        return self.source.nbytes if self.owns and self.source is not None else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the source is there from the start."""

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError("this cache was filled by a lean model; the model was put back since, start with a new cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return 0 if self.source is None else self.source.states.shape[1]

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.source = None

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing: a source has no newest token."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.owns and self.source is not None:
            self.source.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.owns and self.source is not None:
            rows = self.source.states.shape[0] * self.source.beams
            self.source.select(torch.arange(rows, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.owns and self.source is not None:
            rows = self.source.states.shape[0] * self.source.beams
            self.source.select(torch.arange(rows).repeat_interleave(repeats))

    def offload(self) -> None:
        raise UserError("offloading: lean caches stay on the device of their layer")


def source_of(cache: EncoderDecoderCache, module: nn.Module, index: int, first: int, given: Tensor) -> Source:
    """The source of `module`, layer `index`; made from `given` (B, T, E) by layer `first`, which runs first.

    Raises UserError for caches that hold keys and values already, or are no DynamicCache.
    """
    layers = _layers(cache.cross_attention_cache, index)
    layer = layers[index]
    if cache.is_updated.get(index):
        if not isinstance(layer, SourceLayer) or layer.source is None:
            raise UserError(f"cross-attention layer {index} was filled before the model became lean; use a new cache")
        return layer.source
    if not isinstance(layer, SourceLayer) and (type(layer) is not DynamicLayer or layer.get_seq_length()):
        raise UserError(f"cross-attention layer {index} is a {type(layer).__name__}: use a new DynamicCache")
    known = layers[first].source if index != first and isinstance(layers[first], SourceLayer) else None
    source = known if known is not None and known.given is given else Source(given)
    layers[index] = SourceLayer(source, owns=source is not known, module=module)
    cache.is_updated[index] = True
    return source


def _layers(cache: Cache, index: int) -> list[Any]:
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layers: list[Any] = cache.layers
    return layers
