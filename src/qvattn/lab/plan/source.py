"""From what a user names to a `Shape`: a spec, a config file, a saved model, a run, or a name on the hub.

Reads configs only, never weights, and never runs code that comes with a model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ...errors import UserError
from ...models import CausalLMConfig, TranslationConfig
from ...spec import AttentionSpec
from ...train.checkpoint import find_checkpoint
from ...untrusted import parse_json, parse_yaml
from .costs import layer_parameters
from .families import FAMILIES, read_layers
from .layers import Layer, Shape, Weights
from .own import EXTRA, of_causal_lm, of_spec, of_translation
from .weights import count

DEPTHS, DEEPEST = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "num_transformer_layers"), 4096
OUTSIDE = ("openelm",)
"""Families whose code is not in the library: their config is read as it is, their weights are counted by formula."""


def shape_of(source: str) -> Shape:
    """What `source` names, see the module head. Raises UserError that says what was expected."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _of_directory(path)
    if path.is_file():
        return _of_fields(_parsed(path), str(path))
    if "=" in source:
        return of_spec(_inline(source), source)
    if path.suffix in (".json", ".yaml", ".yml") or source.startswith((".", "/", "~")):
        raise UserError(f"{source}: no such file or directory")
    return _of_hub(source)


def shape_of_config(config: Any, name: str = "") -> Shape:
    """A config object: this project's or Hugging Face's; of a model for several kinds of input, its text decoder."""
    if isinstance(config, CausalLMConfig):
        return of_causal_lm(config, name or config.model_type)
    if isinstance(config, TranslationConfig):
        return of_translation(config, name or config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model_type={config.model_type!r}: encoder-decoder models of the library are not supported")
    text = config if config.model_type in FAMILIES else config.get_text_config(decoder=True)
    notes = () if text is config else (f"the text decoder of {config.model_type} alone, without its other parts",)
    layers = read_layers(text)
    return Shape(
        name=name or text.model_type,
        d_model=text.model_dim if text.model_type in OUTSIDE else text.hidden_size,
        layers=tuple(layers),
        weights=_openelm_weights(text, layers) if text.model_type in OUTSIDE else count(text),
        longest=getattr(text, "max_position_embeddings", None) or getattr(text, "max_context_length", None),
        notes=notes,
    )


def _of_directory(path: Path) -> Shape:
    if not (path / "config.json").is_file():
        if not (path / "checkpoints").is_dir():
            raise UserError(f"{path}: holds neither config.json nor the checkpoints of a run")
        return replace(_of_directory(find_checkpoint(path)), name=str(path))
    return _of_fields(_parsed(path / "config.json"), str(path))


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        fields = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON or YAML file: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: expected a mapping, a model's config or the fields of an attention spec")
    return fields


def _of_fields(fields: dict[str, Any], name: str) -> Shape:
    try:
        return _read_fields(fields, name)
    except UserError:
        raise
    except Exception as error:  # a config of any family, with any values
        raise UserError(
            f"{name}: no model can be planned from it: {type(error).__name__}: {_first_line(error)}"
        ) from None


def _read_fields(fields: dict[str, Any], name: str) -> Shape:
    _check_depth(fields, name)
    if "model_type" not in fields:
        if "variant" in fields or "n_heads" in fields:
            return of_spec(fields, name)
        raise UserError(f"{name}: neither a model's config (it has no model_type) nor an attention spec (no n_heads)")
    kind = fields["model_type"]
    if kind in OUTSIDE:
        config = PreTrainedConfig(**{key: value for key, value in fields.items() if key != "model_type"})
        config.model_type = kind
        return shape_of_config(config, name)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UserError(
            f"{name}: model_type={kind!r} is not in the library, and no code that comes with a model is run"
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(fields)
    except Exception as error:
        raise UserError(f"{name}: model_type={kind!r}: {_first_line(error)}") from None
    return shape_of_config(config, name)


def _check_depth(fields: dict[str, Any], name: str) -> None:
    """Layers are built one by one, though without their numbers: a slip of a digit would take for ever."""
    for field in DEPTHS:
        if isinstance(fields.get(field), int) and fields[field] > DEEPEST:
            raise UserError(f"{name}: {field}={fields[field]}: allowed are up to {DEEPEST:,}")


def _of_hub(name: str) -> Shape:
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{name}: no such file or directory, and no model on the hub: {_first_line(error)}") from None
    return _of_fields(fields, name)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _inline(text: str) -> dict[str, Any]:
    """ "variant=gqa,d_model=4096,n_heads=32,v_heads=8,layers=32" -> fields."""
    fields: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not (equals and key.strip() and value.strip()):
            raise UserError(
                f"{part!r}: give FIELD=VALUE, separated by commas, such as variant=gqa,d_model=512,n_heads=8"
            )
        try:
            fields[key.strip()] = parse_yaml(value)
        except ValueError as error:
            raise UserError(f"{part!r}: the value is not valid YAML: {error}") from None
    unknown = fields.keys() - set(AttentionSpec.model_fields) - set(EXTRA)
    if unknown:
        raise UserError(
            f"{min(unknown)}: no such field; allowed are {', '.join((*AttentionSpec.model_fields, *EXTRA))}"
        )
    return fields


def _openelm_weights(config: Any, layers: list[Layer]) -> Weights:
    """OpenELM: a gated feed-forward of a width per layer, RMSNorms (also on queries and keys), one shared table."""
    table = config.vocab_size * config.model_dim
    step = config.ffn_dim_divisor
    total = read = table + config.model_dim
    for layer, multiplier in zip(layers, config.ffn_multipliers, strict=True):
        assert layer.spec is not None
        width = _divisible(multiplier * config.model_dim, step)
        own = layer_parameters(layer.spec) + 3 * width * config.model_dim + 2 * config.model_dim
        own += 2 * config.head_dim if config.normalize_qk_projections else 0
        total, read = total + own, read + own
    if not config.share_input_output_layers:
        total += table
    return Weights(total=total, read=read)


def _divisible(width: float, step: int) -> int:
    """The multiple of `step` nearest to `width`, and never a tenth below it (OpenELM's make_divisible)."""
    near = max(step, int(width + step / 2) // step * step)
    return near + step if near < 0.9 * width else near
