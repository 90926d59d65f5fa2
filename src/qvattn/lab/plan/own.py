"""This project's own models and bare attention specs as the planner's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UserError
from ...models import CausalLM, CausalLMConfig, TranslationConfig, TranslationModel
from ...spec import AttentionSpec
from .costs import layer_parameters
from .layers import Layer, Shape, Weights
from .weights import of_model


def of_causal_lm(config: CausalLMConfig, name: str) -> Shape:
    """Layers store what a StreamCache of the model stores: windows limit what is read, and cut nothing."""
    with torch.device("meta"):
        weights = of_model(CausalLM(config))
    if config.tie_word_embeddings:
        weights = _table_is_read(weights, config.vocab_size * config.d_model)
    layers = _stack(config.decoder_specs, config.share_every)
    return Shape(name=name, d_model=config.d_model, layers=tuple(layers), weights=weights)


def of_translation(config: TranslationConfig, name: str) -> Shape:
    """The decoder's layers, and its cross-attention over the source, whose streams are made once per source."""
    with torch.device("meta"):
        weights = of_model(TranslationModel(config), unread=("encoder.", "source_embedding."))
    weights = _table_is_read(weights, config.target_vocab_size * config.d_model)
    layers = _stack(config.decoder_specs, config.share_every)
    cross = [Layer.attention("cross-attention", spec, over_source=True) for spec in config.cross_specs]
    return Shape(
        name=name,
        d_model=config.d_model,
        layers=(*layers, *cross),
        weights=weights,
        notes=("the encoder's weights count for memory, not for a decoding step",),
    )


def _stack(specs: Sequence[AttentionSpec], share_every: int) -> list[Layer]:
    layers = []
    for i, spec in enumerate(specs):
        borrows = i % share_every != 0
        kind = "attention" if spec.window is None else f"attention, window {spec.window}"
        layers.append(Layer.attention(f"{kind}, shared" if borrows else kind, spec, borrows=borrows))
    return layers


def _table_is_read(weights: Weights, elements: int) -> Weights:
    """The embedding is the output projection too: every step reads it."""
    return Weights(total=weights.total, read=weights.read + elements)


EXTRA = ("layers", "parameters", "name")
"""What the planner understands beside the fields of an AttentionSpec."""


def of_spec(fields: dict[str, Any], name: str) -> Shape:
    """A bare AttentionSpec, `layers` times (1 unless given). `parameters`: of the whole model, if known."""
    depth, parameters = fields.get("layers", 1), fields.get("parameters")
    for field, value in (("layers", depth), ("parameters", 1 if parameters is None else parameters)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{field}={value!r}: allowed are whole numbers of at least 1")
    spec = AttentionSpec(**{key: value for key, value in fields.items() if key not in EXTRA})
    attention = depth * layer_parameters(spec)
    if parameters is not None and parameters < attention:
        raise UserError(f"parameters={parameters}: {depth} layers of attention alone have {attention}")
    total = attention if parameters is None else parameters
    notes = () if parameters else ("only the attention layers are known: give parameters=... for the whole model",)
    kind = "attention" if spec.window is None else f"attention, window {spec.window}"
    return Shape(
        name=str(fields.get("name", name)),
        d_model=spec.d_model,
        layers=(Layer.attention(kind, spec),) * depth,
        weights=Weights(total=total, read=total),
        notes=notes,
    )
