"""A checkpoint that several processes wrote in shards, as one safetensors file that everything else reads.

The file is added to the checkpoint in one step, or written elsewhere with its config. It needs the memory of the model
once. It must never change a weight: the shards are copied as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from safetensors.torch import save_file

from ..data import Tokenizers
from ..errors import UserError
from ..models import QvattnModel
from .checkpoint import MODEL_SHARDS, WEIGHTS, Checkpoint, add_file, choose_checkpoint
from .prepare import build_model, load_model
from .recipe import read_recipe
from .sharding import read_shards, weights

ONE_FILE = "1000TB"
"""More than any model has: transformers would begin a second file."""


def export_run(run_dir: Path, which: Literal["best", "last"] = "best", out: Path | None = None) -> Path:
    """Put the best or newest checkpoint of a run together; returns the file.

    out: a new or empty directory for the model (weights, config and tokenizer) instead of the checkpoint itself.
    Raises `UserError` when there is no checkpoint, it is damaged, or `out` holds something.
    """
    checkpoint = choose_checkpoint(run_dir, which)
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists already; give a new or empty directory")
    if checkpoint.exported and out is None:
        return checkpoint.path / WEIGHTS
    tokenizers = Tokenizers.load(run_dir)
    saved = run_dir / "recipe.yaml"
    model = build_model(read_recipe(saved.read_text(encoding="utf-8"), origin=str(saved)), tokenizers)
    if out is None:
        return export_checkpoint(checkpoint, model)
    load_model(model, checkpoint.path).save_pretrained(out, max_shard_size=ONE_FILE)
    tokenizers.save(out)
    return out / WEIGHTS


def export_checkpoint(checkpoint: Checkpoint, empty: QvattnModel) -> Path:
    """Add model.safetensors to a sharded checkpoint; `empty` is a model like it, whose weights are overwritten."""
    tensors = weights(empty)
    read_shards(checkpoint.path / MODEL_SHARDS, tensors)
    return add_file(checkpoint, WEIGHTS, lambda draft: save_file(tensors, draft, metadata={"format": "pt"}))
