"""Layer by layer through a model: the hidden states of calibration windows, and one layer replaced after the other.

Each layer is fitted on what the layers below it, already converted, hand up. A layer's new weights come from a fit and
its old ones; they are loaded strictly, so a fit that forgets a parameter fails here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention import Attention
from ...errors import UserError
from ...geometry import Geometry
from ...models import CausalLM
from ...models.block import Block
from ...spec import AttentionSpec
from ...variants.separate_keys import MHA
from .fits import FITS, Fitted
from .maps import Maps, Moments
from .weighing import Weighing


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What a layer's new keys and values leave of the old ones: share of the centred energy over calibration text."""

    keys: float
    values: float


class HiddenStates:
    """The hidden states (1, T, E) of calibration windows between two layers of a model."""

    def __init__(self, model: CausalLM, windows: Tensor) -> None:
        """windows: (N, T) token ids; the states are those that enter the first layer."""
        stack = model.decoder_stack
        positions = torch.arange(windows.shape[1], dtype=torch.int32)[None]
        self.model, self.positions = model, positions
        self.states: list[Tensor] = []
        for window in windows:
            x = model.get_input_embeddings()(window[None]) * stack.input_scale
            if stack.position_embedding is not None:
                x = x + stack.position_embedding(positions).to(x.dtype)
            self.states.append(x)

    def through(self, block: Block, states: Sequence[Tensor]) -> Iterator[Tensor]:
        """The states after a layer."""
        spec = block.self_attn.spec
        geometry = Geometry(self.positions, self.positions, causal=True, window=spec.window)
        for x in states:
            yield block(x, geometry, cache=None, layer=0, lent=None, memory=None, watched=None)[0]

    def advance(self, block: Block) -> None:
        """Replace the states by those after a layer."""
        for i, x in enumerate(self.through(block, list(self.states))):
            self.states[i] = x

    def moments(self, block: Block, weighing: Weighing) -> Moments:
        """Second moments of the normed states that enter a layer's attention, every token with its weight."""
        width = self.states[0].shape[2] + 1
        second = torch.zeros(width, width, dtype=torch.float64)
        for x, weight in zip(self.states, weighing.tokens, strict=True):
            y = block.self_norm(x)[0].float()
            rows = torch.cat((y, y.new_ones(len(y), 1)), dim=1)
            second += (rows.T @ (rows * weight[:, None])).double()
        if not torch.isfinite(second).all():
            raise UserError("the model gives numbers that are not finite for the calibration text (NaN or infinity)")
        return Moments(second=second, key_metric=weighing.key_metric, metric=weighing.metric)


def fitted(block: Block, spec: AttentionSpec, moments: Moments) -> tuple[Attention, Residual]:
    """The attention of a layer after its conversion to `spec`, complete, and what it leaves."""
    old = block.self_attn.variant
    assert isinstance(old, MHA)
    maps = Maps.of(old)
    found = FITS[spec.variant](maps, spec, moments)
    new = replaced(block.self_attn, spec, found)
    residual = Residual(
        keys=_left(moments, maps.k, found.keys),
        values=_left(moments, maps.v, found.values),
    )
    return new, residual


def replaced(attention: Attention, spec: AttentionSpec, found: Fitted) -> Attention:
    """A layer with the fitted weights, and the old ones where the fit has none (queries, output, norms of heads)."""
    old = attention.variant
    with torch.device("meta"):
        new = Attention(spec, route=attention.route, impl=attention.impl)
    kept = {name: p for name, p in old.state_dict().items() if name.partition(".")[0] in KEPT}
    like = old.o_proj.weight
    state = kept | {name: t.to(like.dtype).contiguous() for name, t in found.state.items()}
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"the fit of {name} gives numbers that are not finite: the calibration text does not suffice"
            )
    new.variant.load_state_dict(state, strict=True, assign=True)
    new.position.load_state_dict(attention.position.state_dict(), strict=True, assign=True)
    return new.requires_grad_(True).train(attention.training)


KEPT = ("q_proj", "o_proj", "q_head_norm", "k_head_norm")
"""Modules that a conversion takes over unless its fit says otherwise."""


def _left(moments: Moments, old: Tensor, new: Tensor) -> float:
    return max(0.0, moments.energy(old - new)) / max(moments.energy(moments.centred(old)), 1e-30)
