"""What all lean attention classes share: project, append to the cache, attend over streams, output.

A lean class is mixed in before the class of transformers it replaces. Its modules stay those objects with those
weights; only their class changes, so hooks, state dicts and `isinstance` go on working. Without a cache the original
forward runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ...attention import FEW_QUERIES
from ...errors import UserError
from ...geometry import Geometry
from ...kernels import attend, attend_with_weights
from ...models.generation import CACHE_NAME
from ...positions import Rotation
from ...streams import Stream
from ...variants.base import Streams, Terms
from .layers import lean_layer, self_cache
from .masks import kernel_for, past_geometry
from .turns import NAME, KeptRotation, turns_of

IMPLEMENTATIONS = ("sdpa", "eager")
"""Values of `attn_implementation` whose masks are understood."""


class Plan:
    """What `lean` decided about one module; kept on it as `lean_plan`, outside parameters and buffers.

    first: the first lean layer.  turns_at: the layer that keeps the rotation for all, None without one.
    """

    def __init__(self, *, first: int, turns_at: int | None) -> None:
        self.first, self.turns_at = first, turns_at


class LeanAttention(nn.Module):
    """Self-attention over a lean cache layer. A subclass says what is stored and how it is read."""

    lean_plan: Plan
    lean_cache_argument: ClassVar[str] = CACHE_NAME
    lean_rotates_on_read: ClassVar[bool] = False
    lean_shared_memory: ClassVar[bool] = False
    """Whether what it keeps is kept once for all layers (cross-attention)."""

    @classmethod
    def lean_original(cls) -> type[Any]:
        """The class of transformers that this one replaces."""
        return cls.__mro__[cls.__mro__.index(LeanAttention) + 1]

    @classmethod
    def lean_serves(cls, name: str) -> bool:
        """Whether a module of the original class, with this name in the model, is one to look at."""
        return True

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    # ---- what a subclass says -------------------------------------------------------------------

    def lean_refusal(self, tolerance: float) -> str | None:
        """Why this layer cannot be made lean, or None. tolerance: see `lean`."""
        return None

    def lean_keeps(self) -> str | None:
        """Why this layer is left as it is on purpose, or None."""
        return None

    def lean_elements_before(self) -> int:
        """Elements per token that transformers stores."""
        raise NotImplementedError

    def lean_streams(self) -> tuple[Stream, ...]:
        raise NotImplementedError

    def lean_applied(self) -> str:
        """What is applied, in words."""
        raise NotImplementedError

    def lean_folded(self) -> int:
        """Elements of products of weights that decoding keeps."""
        return 0

    def lean_turns(self) -> int:
        """Elements per token of the kept cos and sin, where keys are rotated on read."""
        return 0

    def lean_project(
        self, x: Tensor, kwargs: Mapping[str, Any], fresh: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        """Queries, stream entries, and the values of the new tokens themselves where they come for free.

        fresh: the cache was empty, so that the new tokens are all there is.
        """
        raise NotImplementedError

    def lean_terms(
        self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None, values: Tensor | None, absorb: bool
    ) -> Terms:
        raise NotImplementedError

    def lean_attended(self, terms: Terms, kwargs: Mapping[str, Any]) -> None:
        """Called with what was attended over, for layers that lend it to others."""

    def lean_output(self, o: Tensor, values_given: bool) -> Tensor:
        """o (B, H, M, D) -> (B, M, E). values_given: whether `o` was summed over true values."""
        raise NotImplementedError

    # ---- the call -------------------------------------------------------------------------------

    @property
    def lean_dropout(self) -> float:
        p = getattr(self, "attention_dropout", 0.0)
        return float(p) if self.training else 0.0

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(self.lean_cache_argument)
        if cache is None:
            return super().forward(hidden_states, *args, **kwargs)
        if args:
            raise UserError("a lean attention layer takes keyword arguments only, besides the hidden states")
        cache, index = self_cache(cache), int(self.layer_idx)
        layer = lean_layer(cache, index)
        fresh = layer.length == 0
        q, entries, values = self.lean_project(hidden_states, kwargs, fresh)
        if self.lean_plan.turns_at == index:
            cos, sin = kwargs["position_embeddings"]
            entries |= {NAME: turns_of(cos, sin, hidden_states.shape[0])}
        streams = layer.append(entries)
        geometry = past_geometry(
            cache, kwargs.get("attention_mask"), hidden_states.shape[1], layer.length, hidden_states.device
        )
        few = geometry.q_pos.shape[1] <= FEW_QUERIES < geometry.k_pos.shape[1] and not torch.is_grad_enabled()
        rotation = self._lean_rotation(cache, geometry, streams)
        terms = self.lean_terms(q, streams, rotation, values, few)
        self.lean_attended(terms, kwargs)
        o, weights = lean_attend(self, terms, geometry, scale=self.scaling, dropout=self.lean_dropout)
        return self.lean_output(o, values is not None), weights

    def _lean_rotation(self, cache: Any, geometry: Geometry, streams: Mapping[str, Tensor]) -> Rotation | None:
        at = self.lean_plan.turns_at
        if at is None:
            return None
        turns = streams[NAME] if NAME in streams else lean_layer(cache, at).streams[NAME]
        device = next(iter(streams.values())).device
        return geometry.recall((NAME, device), lambda: KeptRotation(turns.to(device)))


def lean_attend(
    module: LeanAttention, terms: Terms, geometry: Geometry, *, scale: float, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """Output (B, H, M, D) and, as transformers' eager attention gives them, the weights (B, H, M, T)."""
    implementation = module.config._attn_implementation
    if implementation not in IMPLEMENTATIONS:
        raise UserError(
            f"attn_implementation={implementation!r}: lean caches understand the masks of "
            f"{' and '.join(IMPLEMENTATIONS)}; call model.set_attn_implementation('sdpa')"
        )
    if implementation == "eager":
        return attend_with_weights(terms.scores, terms.value, geometry, scale=scale, dropout=dropout)
    impl = "reference" if dropout else kernel_for(geometry)
    return attend(terms.scores, terms.value, geometry, scale=scale, dropout=dropout, impl=impl), None


def not_plain(module: LeanAttention, *names: str) -> str | None:
    """Why the weights of these submodules cannot be folded, or None: quantised and wrapped layers are no nn.Linear."""
    for name in names:
        found = type(getattr(module, name))
        if found is not nn.Linear:
            return f"{name} is a {found.__name__}: its weight is folded, which takes a plain Linear"
    return None
