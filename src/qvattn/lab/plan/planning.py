"""The plan: what a model and each of its conversions cost under one workload, and which of them nothing beats.

It compares costs. It does not know what a conversion does to accuracy; that is measured elsewhere (docs/results).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...errors import UserError
from ...variants import ALIASES, VARIANTS
from .convert import AS_IS, EXACT, candidates, is_exact
from .costs import (
    Step,
    Workload,
    bytes_per_token,
    decode_step,
    largest_batch,
    layer_cache_bytes,
    layer_parameters,
    longest_context,
    row_cache_bytes,
    state_bytes,
)
from .hardware import Hardware
from .layers import Layer, Shape, Weights

ACCURACY = (
    "the plan compares costs and does not know accuracy: a conversion that is not exact needs training; "
    "measured losses are in docs/results and docs/choosing.md"
)


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """Layers of one kind in the model as it is. Elements are per token and layer, bytes of one row over all of them."""

    kind: str
    layers: int
    streams: tuple[str, ...]
    elements: int
    bytes_per_token: int
    tokens_kept: int
    cache_bytes: int
    state_bytes: int


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The most tokens a second that a device allows, over all rows; bound: what limits it; fits: into its memory."""

    hardware: str
    tokens_per_second: float
    bound: str
    fits: bool | None


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """The model as it is, or one conversion of it. Sizes in bytes; `step` figures per decoded token.

    exact: the same function from the model's own weights, so no training.  largest_batch, longest_context: in the
    budget; None: no end, or no budget.  on_front: no other row is as good in cache, operations and parameters and
    better in one of them.
    """

    name: str
    exact: bool
    cache_bytes_per_token: int
    cache_bytes: int
    cache_share: float
    parameters: int
    weight_bytes: int
    flops_per_token: float
    attention_flops_per_token: int
    bytes_per_decoded_token: float
    intensity: float
    largest_batch: int | None
    longest_context: int | None
    rooflines: tuple[Roofline, ...]
    on_front: bool = False
    variants: tuple[str, ...] = ()

    @property
    def costs(self) -> tuple[float, float, float]:
        return self.cache_bytes, self.flops_per_token, self.parameters


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All of it. choice: the row of the front with the highest roofline on the first device; exact_choice: the same
    among rows that need no training."""

    model: str
    context: int
    batch: int
    cache_dtype: str
    weights_dtype: str
    memory: float | None
    longest: int | None
    kinds: tuple[KindRow, ...]
    rows: tuple[PlanRow, ...]
    refused: dict[str, str]
    choice: str
    exact_choice: str
    hardware: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    shape: Shape,
    work: Workload,
    hardware: Sequence[Hardware],
    *,
    memory: float | None = None,
    variants: Sequence[str] | None = None,
) -> Plan:
    """Costs of `shape` under `work`. memory: the budget in bytes, weights included; default: of the first device.

    variants: conversions to show; default all that are possible.
    """
    if not hardware:
        raise UserError("hardware: give at least one device")
    budget = hardware[0].memory if memory is None else memory
    possible, refused = candidates(shape.layers)
    if variants is not None:
        wanted = {AS_IS, *(named(name) for name in variants)}
        possible = {name: new for name, new in possible.items() if name in wanted}
        refused = {name: why for name, why in refused.items() if name in wanted}
    base = row_cache_bytes(shape.layers, work)
    rows = [_row(name, shape, new, work, hardware, budget, base) for name, new in possible.items()]
    rows = _with_front(rows)
    front = [row for row in rows if row.on_front]
    return Plan(
        model=shape.name,
        context=work.context,
        batch=work.batch,
        cache_dtype=str(work.cache_dtype).removeprefix("torch."),
        weights_dtype=str(work.weights_dtype).removeprefix("torch."),
        memory=budget,
        longest=shape.longest,
        kinds=kind_rows(shape.layers, work),
        rows=tuple(rows),
        refused=refused,
        choice=_fastest(front),
        exact_choice=_fastest([row for row in rows if row.exact]),
        hardware=tuple(asdict(one) for one in hardware),
        notes=(*shape.notes, *_beyond(shape, work), ACCURACY),
    )


def named(variant: str) -> str:
    """A row's name from what a user calls it. Raises UserError with the names there are."""
    name = ALIASES.get(variant, variant)
    if name not in VARIANTS and name not in (AS_IS, EXACT):
        raise UserError(f"variant {variant!r}: allowed are {', '.join((*VARIANTS, repr(AS_IS), repr(EXACT)))}")
    return name


def _beyond(shape: Shape, work: Workload) -> tuple[str, ...]:
    if shape.longest is None or work.context <= shape.longest:
        return ()
    return (f"context {work.context:,} is beyond the {shape.longest:,} tokens the model was made for",)


def kind_rows(layers: Sequence[Layer], work: Workload) -> tuple[KindRow, ...]:
    """The layers of the model as it is, grouped by kind."""
    counts = Counter(layers)
    return tuple(
        KindRow(
            kind=layer.kind,
            layers=count,
            streams=tuple(str(s) for s in layer.stored),
            elements=layer.stored_elements,
            bytes_per_token=count * layer.stored_bytes(work.cache_dtype),
            tokens_kept=layer.kept(work.tokens(layer)) if layer.stored else 0,
            cache_bytes=count * layer_cache_bytes(layer, work),
            state_bytes=count * state_bytes(layer, work.cache_dtype),
        )
        for layer, count in counts.items()
    )


def _row(
    name: str,
    shape: Shape,
    layers: Sequence[Layer],
    work: Workload,
    hardware: Sequence[Hardware],
    budget: float | None,
    base: int,
) -> PlanRow:
    weights = shape.weights.changed_by(_attention(layers) - _attention(shape.layers))
    step, cache = decode_step(layers, weights, work), row_cache_bytes(layers, work)
    size = weights.total * work.weights_dtype.itemsize
    room = None if budget is None else budget - size
    return PlanRow(
        name=name,
        exact=is_exact(name, shape.layers, layers),
        cache_bytes_per_token=bytes_per_token(layers, work.cache_dtype),
        cache_bytes=work.batch * cache,
        cache_share=cache / base if base else 1.0,
        parameters=weights.total,
        weight_bytes=size,
        flops_per_token=step.flops_per_token,
        attention_flops_per_token=step.attention_flops_per_token,
        bytes_per_decoded_token=step.bytes_per_token,
        intensity=step.intensity,
        largest_batch=None if room is None else largest_batch(layers, work, room),
        longest_context=None if room is None else longest_context(layers, work, room),
        rooflines=tuple(_roofline(one, step, weights, work, work.batch * cache) for one in hardware),
        variants=tuple(dict.fromkeys(layer.spec.variant for layer in layers if layer.spec is not None)),
    )


def _attention(layers: Sequence[Layer]) -> int:
    return sum(layer_parameters(layer.spec, layer.borrows) for layer in layers if layer.spec is not None)


def _roofline(one: Hardware, step: Step, weights: Weights, work: Workload, cache: int) -> Roofline:
    seconds, bound = step.seconds(one, work.weights_dtype)
    needed = weights.total * work.weights_dtype.itemsize + cache
    return Roofline(
        hardware=one.name,
        tokens_per_second=work.batch / seconds,
        bound=bound,
        fits=None if one.memory is None else needed <= one.memory,
    )


def _with_front(rows: Sequence[PlanRow]) -> list[PlanRow]:
    return [replace(row, on_front=not any(dominates(other.costs, row.costs) for other in rows)) for row in rows]


def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether `one` is nowhere worse (larger) than `other` and somewhere better."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


def _fastest(rows: Sequence[PlanRow]) -> str:
    return max(rows, key=lambda row: (row.rooflines[0].tokens_per_second, -row.cache_bytes)).name
