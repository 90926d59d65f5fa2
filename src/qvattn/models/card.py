"""The model card that `save_pretrained` writes: what the model is, what it caches, how it is loaded.

States what follows from the config alone and claims nothing about quality; the licence is that of the base model where
it is known. Must never overwrite a card that is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..spec import AttentionSpec

if TYPE_CHECKING:
    from .base import QvattnModel

FILE = "README.md"


def write_card(model: QvattnModel, folder: Path) -> None:
    """Write the card of `model` into `folder`, unless there is one."""
    if not (folder / FILE).exists():
        (folder / FILE).write_text(card(model, folder.name), encoding="utf-8")


def card(model: QvattnModel, name: str) -> str:
    """Markdown of the card of `model`, called `name`."""
    config = model.config
    base: dict[str, Any] = getattr(config, "base_model", None) or {}
    specs, dtype = model.decoder_stack.specs, model.dtype
    elements = model.cache_elements_per_token()
    cached = f"{elements:,} elements, {elements * dtype.itemsize:,} bytes in {_short(dtype)}"
    plain = _plain_elements(specs)
    variants = _counted([spec.variant for spec in specs])
    made = [f"A {'translation' if config.is_encoder_decoder else 'language'} model with {variants} attention."]
    if base.get("name"):
        made.append(f"Its weights come from `{base['name']}` (a model of type `{base['model_type']}`).")
    return "\n".join(
        [
            *_front_matter(model, base),
            f"# {name}",
            "",
            " ".join(made),
            "",
            "| | |",
            "|:--|--:|",
            f"| parameters | {sum(p.numel() for p in model.parameters()):,} |",
            f"| layers, width, query heads | {len(specs)}, {config.d_model}, {_counted([s.n_heads for s in specs])} |",
            f"| cached per token and row | {cached} |",
            f"| beside a key and a value for every query head | {100 * elements / plain:.1f} % of {plain:,} elements |",
            "",
            "What each layer caches per token:",
            "",
            "| layers | variant | streams (heads x width; S scores, V values) | elements |",
            "|:--|:--|:--|--:|",
            *_layer_rows(specs, model.decoder_stack.share_every),
            "",
            "## Loading",
            "",
            "```python",
            "import qvattn  # registers the classes",
            "from transformers import AutoTokenizer, "
            f"{'AutoModelForSeq2SeqLM' if config.is_encoder_decoder else 'AutoModelForCausalLM'}",
            "",
            f"model = {'AutoModelForSeq2SeqLM' if config.is_encoder_decoder else 'AutoModelForCausalLM'}"
            f'.from_pretrained("{name}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")  # where one was saved with it',
            "```",
            "",
            "This card states what follows from the configuration; how good the model is, is not said here.",
            "",
        ]
    )


def _front_matter(model: QvattnModel, base: dict[str, Any]) -> list[str]:
    task = "translation" if model.config.is_encoder_decoder else "text-generation"
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {task}",
        f"license: {base.get('licence') or 'unknown'}",
    ]
    return [
        *lines,
        "tags:",
        "- qvattn",
        *[f"- {v}" for v in sorted({s.variant for s in model.decoder_stack.specs})],
        "---",
    ]


def _plain_elements(specs: Sequence[AttentionSpec]) -> int:
    """Elements per token that a key and a value for every query head would take in all layers."""
    return sum(2 * spec.n_heads * spec.d_head for spec in specs)


def _layer_rows(specs: Sequence[AttentionSpec], share_every: int) -> list[str]:
    rows: list[tuple[list[int], str]] = []
    for i, spec in enumerate(specs):
        if i % share_every:
            text = f"{spec.variant} | the streams of layer {i - i % share_every} | 0 |"
        else:
            streams = ", ".join(f"{s.name} {s.heads} x {s.width} {s.role}" for s in spec.streams)
            window = "" if spec.window is None else f", window {spec.window}"
            text = f"{spec.variant}{window} | {streams} | {spec.cache_elements_per_token:,} |"
        if rows and rows[-1][1] == text:
            rows[-1][0].append(i)
        else:
            rows.append(([i], text))
    return [f"| {str(on[0]) if len(on) == 1 else f'{on[0]} to {on[-1]}'} | {text}" for on, text in rows]


def _counted(values: Sequence[Any]) -> str:
    counts = Counter(values)
    if len(counts) == 1:
        return str(values[0])
    return ", ".join(f"{value} ({count} layers)" for value, count in counts.items())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
