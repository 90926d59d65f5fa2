"""`convert`: a trained model with separate keys and values becomes one that caches less; what that costs is measured.

Order: check everything that can be refused; read text; perplexity of the original; layer after layer; perplexity of the
result; write. Must never write a model with a parameter that no fit and no old layer gave.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import UserError
from ...models import CausalLM
from ...spec import AttentionSpec
from ...train.environment import describe_environment
from ..foreign.adopting import adopt
from ..heal.text import cut, fingerprint, name_of, read_ids
from .budget import Effect, measure, spend
from .layers import HiddenStates, Residual, fitted
from .perplexity import Progress, WindowLosses, silent, window_losses
from .report import Conversion, LayerRow, cache_bytes, perplexity_fields
from .saving import check_out, save
from .specs import INSTEAD, WARNINGS, Target, converted_config, target_specs
from .weighing import Weighing, by_activations, by_sensitivity

LEAST_ROWS = 2
"""Calibration tokens for every element of a layer's input, at least: with fewer the regressions fit noise."""


class Options(BaseModel):
    """How to calibrate and measure. Sizes in tokens.

    window: of calibration and held-out text.  tokens, heldout_tokens: how many, taken from seeded places of the
    calibration text and from the start of the held-out text.  weighing: how much errors count, see that module.
    measure_budget: give layers different widths, by measured effect, keeping the total.
    budget_windows: calibration windows that effect is measured on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    calibration: str
    heldout: str | None = None
    window: int = Field(default=2048, ge=8)
    tokens: int = Field(default=16384, ge=1)
    heldout_tokens: int = Field(default=32768, ge=1)
    seed: int = 1
    weighing: Literal["sensitivity", "activations"] = "sensitivity"
    measure_budget: bool = False
    budget_windows: int = Field(default=1, ge=1)


def convert(
    model_or_path: PreTrainedModel | str | Path,
    target: Target,
    options: Options,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> tuple[CausalLM, Conversion]:
    """Convert, measure and (with `out`) save. A loaded model of ours is converted in place; its weights change.

    Raises UserError, before anything is computed where possible: variants and widths that do not fit the model,
    architectures and features that are not supported, text that is missing, too short or not UTF-8, numbers that are
    not finite, an output directory that holds something else.
    """
    began = time.monotonic()
    if out is not None:
        check_out(out, overwrite)
    model = adopt(model_or_path)
    specs = target_specs(model, target)
    calibration, heldout = _texts(model, options)
    notes = _notes(model, target, specs)
    before_bytes = cache_bytes(model)
    before = None if heldout is None else window_losses(model, heldout, progress=progress, what="original")
    weighings = weighed(model, calibration, options, progress)
    effects = None
    if options.measure_budget:
        effects = measure(model, specs, calibration, weighings, scored=options.budget_windows, progress=progress)
        specs = spend(effects, specs)
    old = [spec.cache_elements_per_token for spec in model.decoder_stack.specs]
    residuals = convert_layers(model, specs, calibration, weighings, progress)
    model = assembled(model, specs)
    after = None if heldout is None else window_losses(model, heldout, progress=progress, what="converted")
    report = Conversion(
        source=_name(model, model_or_path),
        variant=specs[0].variant,
        options=target.model_dump(exclude_none=True) | options.model_dump(exclude={"calibration", "heldout"}),
        calibration=_described(options.calibration, calibration),
        heldout=None if heldout is None or options.heldout is None else _described(options.heldout, heldout),
        layers=_rows(specs, old, residuals, effects),
        cache_dtype=str(model.dtype).removeprefix("torch."),
        cache_bytes_per_token=cache_bytes(model),
        cache_bytes_per_token_before=before_bytes,
        **perplexity_fields(before, after),
        seconds=time.monotonic() - began,
        environment=describe_environment(
            device=model.device, processes=1, precision=str(model.dtype).removeprefix("torch."), seed=options.seed
        ),
        notes=notes,
    )
    if out is not None:
        progress("writing", 0, 1)
        save(model, report.model_dump(mode="json"), out)
        progress("writing", 1, 1)
    return model, report


@torch.no_grad()
def convert_layers(
    model: CausalLM,
    specs: Sequence[AttentionSpec],
    windows: Tensor,
    weighings: Sequence[Weighing],
    progress: Progress = silent,
) -> list[Residual]:
    """Replace the attention of every layer in place, from bottom to top, each fitted on what the converted ones give.

    windows: (N, T) token ids.  weighings: of each layer, for these windows.
    """
    hidden = HiddenStates(model, windows)
    residuals = []
    for i, (block, spec) in enumerate(zip(model.decoder_stack.blocks(), specs, strict=True)):
        block.self_attn, residual = fitted(block, spec, hidden.moments(block, weighings[i]))
        residuals.append(residual)
        if i + 1 < len(specs):
            hidden.advance(block)
        progress("converting layers", i + 1, len(specs))
    return residuals


def weighed(model: CausalLM, windows: Tensor, options: Options, progress: Progress = silent) -> list[Weighing]:
    """How much errors count in each layer, as the options ask."""
    if options.weighing == "activations":
        return by_activations(model, windows)
    return by_sensitivity(model, windows, seed=options.seed, progress=progress)


def assembled(model: CausalLM, specs: Sequence[AttentionSpec]) -> CausalLM:
    """A model of the converted config that takes over every parameter by name; any other count of them raises."""
    with torch.device("meta"):
        new = CausalLM(converted_config(model.config, specs))
    new.load_state_dict(model.state_dict(), strict=True, assign=True)
    new.generation_config, new.tokenizer = model.generation_config, model.tokenizer
    return new.requires_grad_(True).train(model.training)


def _texts(model: CausalLM, options: Options) -> tuple[Tensor, Tensor | None]:
    if model.tokenizer is None:
        raise UserError("the model has no tokenizer beside it, so no text can be read; save one in its directory")
    longest = model.config.max_position_embeddings
    if longest is not None and options.window > longest:
        raise UserError(f"--window {options.window}: the model was made for at most {longest} tokens")
    needed = LEAST_ROWS * model.config.d_model
    if options.tokens < needed:
        raise UserError(
            f"--tokens {options.tokens}: too few for a model of width {model.config.d_model}; give at least {needed}"
        )
    all_windows = cut(
        read_ids(options.calibration, "--calibration", model.tokenizer),
        options.window,
        options.calibration,
        "--calibration",
    )
    wanted = -(-options.tokens // options.window)
    if len(all_windows) < wanted and len(all_windows) * options.window < needed:
        raise UserError(
            f"--calibration {options.calibration}: holds {len(all_windows) * options.window} tokens in whole windows "
            f"of {options.window}; at least {needed} are needed for a model {model.config.d_model} elements wide"
        )
    order = torch.randperm(len(all_windows), generator=torch.Generator().manual_seed(options.seed))
    calibration = torch.from_numpy(all_windows).long()[order[:wanted].sort().values]
    if options.heldout is None:
        return calibration, None
    held = cut(read_ids(options.heldout, "--heldout", model.tokenizer), options.window, options.heldout, "--heldout")
    count = -(-options.heldout_tokens // options.window)
    return calibration, torch.from_numpy(held[:count]).long()


def _described(path: str, windows: Tensor) -> dict[str, Any]:
    return {
        "text": name_of(path),
        "windows": len(windows),
        "window": windows.shape[1],
        "tokens": windows.numel(),
        "fingerprint": fingerprint(windows.int().numpy()),
    }


def _rows(
    specs: Sequence[AttentionSpec], old: Sequence[int], residuals: Sequence[Residual], effects: Sequence[Effect] | None
) -> list[LayerRow]:
    return [
        LayerRow(
            layer=i,
            variant=spec.variant,
            streams=[str(stream) for stream in spec.streams],
            elements=spec.cache_elements_per_token,
            elements_before=old[i],
            key_residual=residuals[i].keys,
            value_residual=residuals[i].values,
            effect=None if effects is None else dict(zip(effects[i].widths, effects[i].losses, strict=True)),
        )
        for i, spec in enumerate(specs)
    ]


def _notes(model: CausalLM, target: Target, specs: Sequence[AttentionSpec]) -> list[str]:
    made = specs[0].variant
    notes = [note for note in (WARNINGS.get(made), INSTEAD.get((target.variant, made))) if note]
    if any(spec.variant_class.two_routes and not spec.can_absorb for spec in specs):
        notes.append("keys are rebuilt from the cache at every step, because they are rotated or normed after that")
    return notes


def _name(model: CausalLM, given: Any) -> str:
    base = model.config.base_model or {}
    return str(base.get("name") or (given if isinstance(given, str | Path) else type(given).__name__))


__all__ = ["Conversion", "Options", "Target", "WindowLosses", "convert", "convert_layers", "weighed", "window_losses"]
