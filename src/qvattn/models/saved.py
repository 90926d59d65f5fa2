"""A saved model's files, looked at before anything of the size that they claim is allocated.

A damaged or foreign file must raise UserError with its name, never an error from deep inside a loader; a small file
must never make a large model. Only safetensors are weights here: nothing is ever unpickled.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from ..untrusted import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

INDEX = "model.safetensors.index.json"
DEPTHS = ("layers", "encoder_layers", "decoder_layers")


def check_saved(kind: type[PreTrainedModel], folder: Path, config: Any = None) -> None:
    """Raise UserError unless `folder` holds the weights of a `kind` as its config describes it."""
    shapes = _shapes(folder)
    if config is None:
        config = _config(kind, folder)
    _check_types(config, folder)
    for field in DEPTHS:
        depth = getattr(config, field, 0)
        if not isinstance(depth, int) or depth > len(shapes):
            raise UserError(f"{folder}: config.json says {field}={depth!r}, the weights are {len(shapes)} tensors")
    try:
        with torch.device("meta"):
            wanted = kind(config).state_dict()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{folder}: no model can be made of config.json: {_line(error)}") from None
    wrong = [name for name, tensor in wanted.items() if name in shapes and tuple(tensor.shape) != shapes[name]]
    if wrong:
        raise UserError(f"{folder}: mismatched keys: {', '.join(sorted(wrong)[:5])}")


def _check_types(config: Any, folder: Path) -> None:
    """Numbers must be numbers: a config takes whatever JSON holds, and a model would stumble over it much later."""
    for field, hint in get_type_hints(type(config), localns={"torch": torch}).items():
        allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if not set(allowed) <= {int, float, bool, str, NoneType} or not hasattr(config, field):
            continue
        value = getattr(config, field)
        fits = type(value) in allowed or (float in allowed and type(value) is int)
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in allowed)
            raise UserError(f"{folder / 'config.json'}: {field}={value!r}: expected {names}")


def _config(kind: type[PreTrainedModel], folder: Path) -> PreTrainedConfig:
    try:
        content = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a mapping")
        config: PreTrainedConfig = kind.config_class.from_dict(content)
        return config
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    except Exception as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {_line(error)}") from None


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every saved tensor, from the headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 - not a mapping
                    shapes[name] = tuple(content.get_slice(name).get_shape())
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{file} is not a whole safetensors file: {_line(error)}") from None
    return shapes


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = set(parse_json((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{folder / INDEX} cannot be read: {_line(error)}") from None
    else:
        names = {"model.safetensors"}
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise UserError(f"{folder / INDEX} names {outside[0]!r}: allowed are files beside it")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} holds no {missing[0]}; weights are read from safetensors files only")
    return sorted(folder / name for name in names)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
