"""What a recipe would cost, without training it: parameters, memory, batches an epoch, cache elements.

The model is built without memory for its weights. A hub corpus is looked at through a sample of its first rows; what
cannot be reached is reported as unknown, never guessed.
"""

from __future__ import annotations

from typing import Any

import torch

from ..data import BatchPlan, HubSpec
from ..errors import UserError
from ..models import QvattnModel
from ..models.block import Block
from .prepare import encode, model_for
from .recipe import Recipe

SAMPLE = 20_000
"""Rows of a hub corpus that are fetched to estimate batches an epoch."""

HALF = 2
FULL = 4


def describe(recipe: Recipe, processes: int = 1) -> dict[str, Any]:
    """Counts and estimates for one recipe, in JSON's types. Bytes are for one process of so many."""
    data = _data(recipe)
    sizes = data.pop("vocabulary")
    with torch.device("meta"):
        model = model_for(recipe, *sizes)
    return {
        "name": recipe.name,
        "parameters": {"total": model.num_parameters(), "attention": model.attention_parameters()},
        "cache_elements_per_token": {
            "layer": model.cache_elements_per_token_layer(),
            "model": model.cache_elements_per_token(),
        },
        "vocabulary": {"source": sizes[0], "target": sizes[1]},
        "processes": processes,
        "memory_bytes": memory(recipe, model, length=data["mean_target_length"] or 30.0, processes=processes),
        **data,
    }


def readable(facts: dict[str, Any]) -> str:
    """The same for people, one fact a line."""
    memory = facts["memory_bytes"]
    each = f" on each of {facts['processes']} processes" if facts["processes"] > 1 else ""
    parts = ", ".join(f"{name} {_size(value)}" for name, value in memory.items() if name != "total")
    batches = facts["batches_per_epoch"]
    about = "about " if facts["estimated"] else ""
    per_epoch = f"{about}{batches:,}" if batches is not None else f"unknown ({facts['reason']})"
    lines = [
        ("recipe", facts["name"]),
        ("parameters", "{total:,} in all, {attention:,} in attention".format(**facts["parameters"])),
        ("vocabulary", "{source:,} source, {target:,} target".format(**facts["vocabulary"])),
        (
            "cache",
            "{layer:,} elements per token and layer, {model:,} in all".format(**facts["cache_elements_per_token"]),
        ),
        ("memory", f"about {_size(memory['total'])}{each}: {parts}"),
        ("batches an epoch", per_epoch),
    ]
    if facts["steps_per_epoch"] is not None:
        lines.append(("steps an epoch", f"{about}{facts['steps_per_epoch']:,.1f}"))
    return "\n".join(f"{label + ':':18}{text}" for label, text in lines)


def _data(recipe: Recipe) -> dict[str, Any]:
    """Vocabulary sizes and batches an epoch, from the corpus or a sample of it."""
    hub = recipe.data.hub
    rows = None
    looked_at = recipe
    try:
        if hub is not None:
            rows = _hub_rows(hub)
            looked_at = _sampled(recipe, hub)
        encoded = encode(looked_at)
    except UserError as error:
        if hub is None:
            raise
        unknown = {"batches_per_epoch": None, "steps_per_epoch": None, "estimated": False, "reason": _short(error)}
        return {"vocabulary": (recipe.data.vocab_size,) * 2, "mean_target_length": None, **unknown}
    plan = BatchPlan(encoded.train.lengths, max_tokens=recipe.data.max_tokens, seed=recipe.train.seed)
    batches = len(plan.epoch(0))
    factor = max(rows / len(plan), 1.0) if rows is not None else 1.0
    limit = recipe.data.max_train_pairs
    if hub is not None and limit is not None:
        factor = min(factor, max(limit / len(plan), 1.0))
    sizes = (len(encoded.tokenizers.source), len(encoded.tokenizers.target))
    return {
        "vocabulary": sizes if hub is None else (recipe.data.vocab_size,) * 2,
        "mean_target_length": float(encoded.train.lengths.reshape(len(plan), -1)[:, -1].mean()),
        "batches_per_epoch": round(batches * factor),
        "steps_per_epoch": batches * factor / recipe.train.accumulate,
        "estimated": hub is not None,
        "reason": None,
    }


def _sampled(recipe: Recipe, hub: HubSpec) -> Recipe:
    limit = min(recipe.data.max_train_pairs or SAMPLE, SAMPLE)
    data = {"hub": hub.model_copy(update={"streaming": True}), "max_train_pairs": limit}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})


def _hub_rows(hub: HubSpec) -> int | None:
    """Rows of the training split, from the corpus's description alone."""
    import datasets

    try:
        splits = datasets.load_dataset_builder(hub.name, hub.config).info.splits or {}
    except Exception as error:  # whatever the network, the hub or its client come up with
        raise UserError(f"hub.name={hub.name!r}: {error}") from error
    return splits[hub.train_split].num_examples if hub.train_split in splits else None


def memory(recipe: Recipe, model: QvattnModel, *, length: float, processes: int = 1) -> dict[str, int]:
    """Estimates of the bytes on each of `processes`, whose rows share the batch of `data.max_tokens`.

    Weights, gradients and both Adam moments are kept in fp32: whole on every process, or divided (`fsdp2`).
    copies: of the weights in bf16 or fp16, which autocast keeps for the backward pass. exchange: what is sent, with
    `ddp` all gradients once more in its buckets; with `fsdp2` the gathered weights of two blocks and of what lies
    outside of blocks, and gradients of one block before they are divided.
    length: mean tokens of a target row.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    divided = recipe.train.parallel == "fsdp2" and processes > 1
    share = processes if divided else 1
    half = HALF if recipe.train.precision != "fp32" else FULL
    if divided:
        blocks = [
            sum(p.numel() for p in module.parameters()) for module in model.modules() if isinstance(module, Block)
        ]
        outside, largest = parameters - sum(blocks), max(blocks)
        exchange = half * (2 * outside + 3 * largest) + FULL * largest
    else:
        exchange = FULL * parameters if processes > 1 else 0
    found = {
        "weights": FULL * parameters // share,
        "gradients": FULL * parameters // share,
        "adam": 2 * FULL * parameters // share,
        "copies": 0 if divided or half == FULL else half * parameters,
        "exchange": exchange,
        "activations": _activations(recipe, length) // processes,
    }
    return {**found, "total": sum(found.values())}


def _activations(recipe: Recipe, length: float) -> int:
    """A rough count of what the backward pass needs of one full batch.

    Per token and layer about 12 vectors of the model's width for an attention, 3 of the feed-forward's, the attention
    weights twice where they are written out. Logits do not count: the objective makes them a few rows at a time.
    Measured for multi30k_small: 0.8 to 1.2 times this.
    """
    spec, tokens = recipe.model, recipe.data.max_tokens
    if recipe.task == "causal-lm":
        length = recipe.data.block_size
    element = FULL if recipe.train.precision == "fp32" else HALF
    attention = 12 * spec.d_model + 2 * spec.n_heads * length
    feed_forward = (4 if spec.activation == "swiglu" else 3) * spec.d_ff
    decoder = spec.decoder_layers * ((2 if recipe.task == "translation" else 1) * attention + feed_forward)
    encoder = spec.encoder_layers * (attention + feed_forward) if recipe.task == "translation" else 0
    return round(tokens * (encoder + decoder) * element)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
