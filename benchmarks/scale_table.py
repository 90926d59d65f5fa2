"""Memory on each process and expected throughput, by model size and number of GPUs: the tables of docs/scale.md.

    python benchmarks/scale_table.py [--hardware h100-sxm] [--utilisation 0.4]

Everything here is computed, nothing is measured: bytes by `qvattn train --dry-run`'s own formula, tokens a second from
6 FLOPs a parameter and token (12 x layers x width x context more for attention) at an assumed share of the peak.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from qvattn.lab.plan.hardware import table
from qvattn.models import QvattnModel
from qvattn.train.dry_run import memory
from qvattn.train.prepare import model_for
from qvattn.train.recipe import Recipe

SIZES: dict[str, dict[str, int]] = {
    "0.16B": {"d_model": 768, "d_ff": 2048, "n_heads": 12, "decoder_layers": 16},
    "0.4B": {"d_model": 1024, "d_ff": 2816, "n_heads": 16, "decoder_layers": 24},
    "1.4B": {"d_model": 2048, "d_ff": 5632, "n_heads": 16, "decoder_layers": 24},
    "7B": {"d_model": 4096, "d_ff": 11008, "n_heads": 32, "decoder_layers": 32},
}
VOCABULARY, CONTEXT, THOUSAND = 32_000, 2048, 1000
LAYOUTS = (("ddp", 1), ("ddp", 8), ("fsdp2", 8), ("fsdp2", 64))
STATES = ("weights", "gradients", "adam", "copies", "exchange")


def recipe_for(size: str, parallel: str, context: int) -> Recipe:
    """A language model in bf16 of one of the sizes."""
    content: dict[str, Any] = {
        "name": size,
        "task": "causal-lm",
        "data": {
            "corpus": "hub-text",
            "hub": {"name": "a corpus"},
            "vocab_size": VOCABULARY,
            "block_size": context,
            "max_tokens": max(THOUSAND, context),
        },
        "model": {**SIZES[size], "activation": "swiglu", "norm_type": "rms", "position": "rope"},
        "train": {"precision": "bf16", "parallel": parallel},
    }
    return Recipe.model_validate(content)


def activations(size: str, model: QvattnModel, context: int) -> float:
    """Bytes for 1,000 tokens on one process."""
    recipe = recipe_for(size, "ddp", context)
    return memory(recipe, model, length=context)["activations"] * THOUSAND / recipe.data.max_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("--utilisation", type=float, default=0.4)
    chosen = parser.parse_args()
    peak = table()[chosen.hardware].flops["bf16"]
    print("| parameters | layout | weights | gradients | Adam | bf16 copies | exchange | sum |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for size, shape in SIZES.items():
        with torch.device("meta"):
            model = model_for(recipe_for(size, "ddp", CONTEXT), VOCABULARY, VOCABULARY)
        count = f"{model.num_parameters() / 1e9:.2f}B"
        for parallel, processes in LAYOUTS:
            found = memory(recipe_for(size, parallel, CONTEXT), model, length=CONTEXT, processes=processes)
            cells = [found[key] for key in STATES]
            print(
                f"| {count} | {parallel} x {processes} | "
                + " | ".join(f"{c / 1e9:.1f}" for c in (*cells, sum(cells)))
                + " |"
            )
        flops = 6 * model.num_parameters() + 12 * shape["decoder_layers"] * shape["d_model"] * CONTEXT
        fused, written = (activations(size, model, context) / 1e9 for context in (2, CONTEXT))
        speed = chosen.utilisation * peak / flops
        rows.append(f"| {count} | {fused:.1f} | {written:.1f} | {flops / 1e9:.1f} G | {speed:,.0f} |")
    print("\n| parameters | activations, fused kernel | attention written out | FLOPs a token | tokens/s a GPU |")
    print("|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
