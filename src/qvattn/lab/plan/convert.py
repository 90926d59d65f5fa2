"""The models that a model could be converted to: every variant at its widths, and its own exact forms.

Head counts, head width, position, window and biases stay; what a variant adds takes its default. Variants are taken
from the table VARIANTS and judged by AttentionSpec; nothing here knows one by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UserError
from ...spec import AttentionSpec, preset
from ...variants import VARIANTS
from .layers import Layer

AS_IS = "as it is"
EXACT = "exact form"


def convert(layer: Layer, variant: str) -> Layer:
    """The layer with attention of `variant`; unchanged where it has none. Raises UserError where it cannot be."""
    if layer.spec is None:
        return layer
    return layer.converted(converted(layer.spec, variant))


def converted(spec: AttentionSpec, variant: str) -> AttentionSpec:
    """`spec` as `variant`: the spec itself where it is that variant already."""
    if spec.variant == variant:
        return spec
    shared = spec.v_heads or spec.k_heads
    return preset(
        variant,
        spec.d_model,
        spec.n_heads,
        kv_heads=shared,
        d_head=spec.d_head,
        position=spec.position.kind,
        causal=spec.causal,
        window=spec.window,
        bias=spec.bias,
    )


def exact(layers: Sequence[Layer]) -> tuple[Layer, ...] | None:
    """Every layer in the form that stores least and computes the same; None where that is what the model does."""
    new = tuple(min((layer, *_exact_forms(layer)), key=lambda one: one.stored_elements) for layer in layers)
    return None if new == tuple(layers) else new


def _exact_forms(layer: Layer) -> list[Layer]:
    return [convert(layer, name) for name in layer.exact]


def candidates(layers: Sequence[Layer]) -> tuple[dict[str, tuple[Layer, ...]], dict[str, str]]:
    """Name -> layers of every conversion that differs from the model as it is; and name -> why not, where refused."""
    possible: dict[str, tuple[Layer, ...]] = {AS_IS: tuple(layers)}
    refused: dict[str, str] = {}
    done: dict[tuple[Layer, str], Layer] = {}
    for name in VARIANTS:
        try:
            for layer in set(layers):
                done[layer, name] = convert(layer, name)
        except UserError as error:
            refused[name] = str(error)
            continue
        new = tuple(done[layer, name] for layer in layers)
        if not all(one.spec == other.spec for one, other in zip(new, layers, strict=True)):
            possible[name] = new
    own = exact(layers)
    if own is not None and own not in possible.values():
        possible[EXACT] = own
    return possible, refused


def is_exact(name: str, layers: Sequence[Layer], new: Sequence[Layer]) -> bool:
    """Whether the conversion `name` computes what the model computes, from its own weights."""
    return name in (AS_IS, EXACT) or all(
        one.spec == other.spec or name in one.exact for one, other in zip(layers, new, strict=True)
    )
