"""`lean`: give a loaded transformers model an exact lean cache, in place. Must never change a weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ...errors import UserError
from ...streams import cache_elements
from .core import IMPLEMENTATIONS, LeanAttention, Plan
from .report import LayerReport, LeanReport
from .table import ADAPTERS, adapter

TOLERANCE = 1e-3
"""Default of `tolerance`; in float32 that is a condition number of 8,400."""


def lean(model: Any, *, tolerance: float = TOLERANCE, partial: bool = False) -> LeanReport:
    """Change the attention layers of a transformers model so that they keep a lean cache. Same weights, same logits.

    tolerance: where values are rebuilt through an inverse (square MHA), the largest allowed condition number times
        the epsilon of the model's dtype, which bounds the relative error of the values.
    partial: leave layers that are refused as they are, instead of refusing the model.

    Returns what was applied per layer, with bytes per token before and after; `report.undo()` takes it back.
    Raises UserError for unsupported architectures, a model that is lean already, and layers that are refused.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in ADAPTERS:
        raise UserError(
            f"model_type={model_type!r}: there is no exact lean cache for this architecture; "
            f"supported are {', '.join(sorted(ADAPTERS))}"
        )
    kind = adapter(model_type)
    found: list[tuple[str, Any]] = [
        (name, m) for name, m in model.named_modules() if type(m) is kind.lean_original() and kind.lean_serves(name)
    ]
    if not found:
        already = any(isinstance(m, LeanAttention) for m in model.modules())
        why = "this model is lean already" if already else f"no {kind.lean_original().__name__} found in it"
        raise UserError(f"model_type={model_type!r}: {why}")
    implementation = found[0][1].config._attn_implementation
    if implementation not in IMPLEMENTATIONS:
        raise UserError(
            f"attn_implementation={implementation!r}: lean caches understand the masks of "
            f"{' and '.join(IMPLEMENTATIONS)}; call model.set_attn_implementation('sdpa') first"
        )
    return _apply(model_type, kind, found, tolerance, partial)


def _apply(
    model_type: str, kind: type[LeanAttention], found: list[tuple[str, Any]], tolerance: float, partial: bool
) -> LeanReport:
    original = kind.lean_original()
    for _, module in found:
        module.__class__ = kind
    try:
        kept = {name: module.lean_keeps() for name, module in found}
        refused = {name: module.lean_refusal(tolerance) for name, module in found if not kept[name]}
        _refuse(model_type, kept, refused, partial)
        layers = [_layer_report(name, module, kept[name] or refused[name]) for name, module in found]
    finally:
        for _, module in found:
            module.__class__ = original
    chosen = [module for name, module in found if not (kept[name] or refused[name])]
    first = int(chosen[0].layer_idx)
    for module in chosen:
        module.lean_plan = Plan(turns_at=first if kind.lean_rotates_on_read else None, first=first)
        module.__class__ = kind
    if kind.lean_shared_memory:
        lean_ones = [i for i, layer in enumerate(layers) if layer.lean]
        for i in lean_ones[1:]:
            layers[i] = replace(layers[i], bytes_after=0)

    def undo() -> None:
        for module in chosen:
            if isinstance(module, kind):
                module.__class__ = original
                for name in [n for n in module.__dict__ if n.startswith("lean_")]:
                    del module.__dict__[name]

    shared = chosen[0].lean_turns() * _itemsize(chosen[0]) if kind.lean_rotates_on_read else 0
    return LeanReport(architecture=model_type, layers=tuple(layers), shared_bytes_per_token=shared, _undo=undo)


def _refuse(model_type: str, kept: dict[str, str | None], refused: dict[str, str | None], partial: bool) -> None:
    reasons = {name: why for name, why in refused.items() if why}
    some_remain = len(reasons) < len(refused)
    if not refused:
        raise UserError(f"model_type={model_type!r}: {next(why for why in kept.values() if why)}")
    if reasons and not (partial and some_remain):
        hint = " (partial=True leaves these layers as they are)" if some_remain else ""
        raise UserError(f"model_type={model_type!r}{hint}: " + "; ".join(f"{n}: {why}" for n, why in reasons.items()))


def _itemsize(module: nn.Module) -> int:
    return next(p for p in module.parameters() if p.dtype.is_floating_point).dtype.itemsize


def _layer_report(name: str, module: Any, reason: str | None) -> LayerReport:
    size = _itemsize(module)
    before = module.lean_elements_before() * size
    if reason:
        return LayerReport(
            name=name, applied=f"left as it was: {reason}", bytes_before=before, bytes_after=before, lean=False
        )
    return LayerReport(
        name=name,
        applied=module.lean_applied(),
        bytes_before=before,
        bytes_after=cache_elements(module.lean_streams()) * size,
        folded_bytes=module.lean_folded() * size,
    )


def is_lean(model: nn.Module) -> bool:
    """Whether any layer of a model keeps a lean cache."""
    return any(isinstance(m, LeanAttention) for m in model.modules())
