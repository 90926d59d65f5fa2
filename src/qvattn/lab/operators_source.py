"""From what a user names to attention layers: a run, a saved model, or a foreign language model (`qvattn.hf.adopt`).

With text, also the second moments of what those layers read, by which `operators` weighs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention import Attention
from ..data.lines import read_lines
from ..errors import UserError
from ..models import CausalLM, QvattnModel, TranslationModel
from ..train.checkpoint import find_checkpoint
from .check.loading import find_run, load
from .check.spying import spying

BLOCK = 512
"""Tokens of a pass over the text."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, what it is called, and its attention layers by place."""

    name: str
    model: QvattnModel
    layers: dict[str, list[Attention]]


def open_model(source: str) -> Model:
    """A run directory or one of its checkpoints, or whatever `adopt` takes.

    Raises UserError where there is no model, or one that is not supported.
    """
    path = Path(source).expanduser()
    run = find_run(path) if path.exists() else None
    if run is not None:
        model = load(find_checkpoint(run) if run.resolve() == path.resolve() else path)
    else:
        from ..hf import adopt

        model = adopt(source, dtype=torch.float32)
    return Model(name=path.name if path.exists() else source, model=model, layers=_layers(model))


def _layers(model: QvattnModel) -> dict[str, list[Attention]]:
    if isinstance(model, TranslationModel):
        decoder = list(model.decoder.blocks())
        return {
            "encoder": [block.self_attn for block in model.encoder.blocks()],
            "decoder": [block.self_attn for block in decoder],
            "cross": [block.cross_attn for block in decoder],
        }
    return {"decoder": [block.self_attn for block in model.decoder_stack.blocks()]}


def second_moments(
    opened: Model, text: Path, tokens: int, progress: Callable[[int], None] = lambda done: None
) -> dict[str, list[Tensor]]:
    """Second moment and mean (E, E + 1) of what every layer's attention reads on the first tokens of a file.

    Raises UserError for a model that is no language model, one without a tokenizer, and a text that is too short.
    """
    model = opened.model
    if not isinstance(model, CausalLM):
        raise UserError("--text: only a language model's layers can be weighed by their inputs on a text")
    ids = _token_ids(model, text, tokens)
    sums: list[Any] = [0.0] * len(opened.layers["decoder"])
    model.eval()
    with spying(model.decoder_stack) as seen:
        for start in range(0, len(ids), BLOCK):
            with torch.inference_mode():
                model(torch.tensor([ids[start : start + BLOCK]]), use_cache=False)
            for i, one in enumerate(seen):
                x = one.inputs[-1][0].double()
                sums[i] = sums[i] + torch.cat([x.mT @ x, x.sum(dim=0)[:, None]], dim=1)
                for kept in (one.inputs, one.queries, one.entries, one.terms):
                    kept.clear()
            progress(min(start + BLOCK, len(ids)))
    return {"decoder": [total.clone() / len(ids) for total in sums]}


def _token_ids(model: CausalLM, text: Path, tokens: int) -> Sequence[int]:
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise UserError("--text: the model comes without a tokenizer, so it cannot read a text")
    ids: list[int] = []
    for line in read_lines(text, "--text"):
        ids += tokenizer.encode(line + "\n")
        if len(ids) >= tokens:
            break
    if len(ids) < 2 * model.config.d_model:
        wanted = 2 * model.config.d_model
        raise UserError(f"--text {text}: {len(ids)} tokens; at least {wanted} (two widths) are needed for a covariance")
    return ids[:tokens]
