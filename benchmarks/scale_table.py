"""Memory on each process and expected throughput, by model size and number of GPUs: the tables of docs/scale.md.

    python benchmarks/scale_table.py [--hardware h100-sxm] [--utilisation 0.4]

Everything here is computed, nothing is measured: bytes by `qvattn train --dry-run`'s own formula, tokens a second from
6 FLOPs a parameter and token (12 x layers x width x context more for attention) at an assumed share of the peak.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from qvattn.lab.plan.hardware import load_hardware
from qvattn.train.dry_run import memory
from qvattn.train.prepare import model_for
from qvattn.train.recipe import Recipe

SIZES: dict[str, dict[str, int]] = {
    "0.16B": {"d_model": 768, "d_ff": 2048, "n_heads": 12, "decoder_layers": 16},
    "0.4B": {"d_model": 1024, "d_ff": 2816, "n_heads": 16, "decoder_layers": 24},
    "1.4B": {"d_model": 2048, "d_ff": 5632, "n_heads": 16, "decoder_layers": 24},
    "7B": {"d_model": 4096, "d_ff": 11008, "n_heads": 32, "decoder_layers": 32},
}
VOCABULARY, CONTEXT, TOKENS_A_GPU = 32_000, 2048, 8 * 2048
LAYOUTS = (("ddp", 1), ("ddp", 8), ("fsdp2", 8), ("fsdp2", 64))


def recipe_for(size: str, parallel: str, processes: int) -> Recipe:
    """A bf16 language model whose step gives every GPU the same number of tokens."""
    content: dict[str, Any] = {
        "name": size,
        "task": "causal-lm",
        "data": {
            "corpus": "hub-text",
            "hub": {"name": "a corpus"},
            "vocab_size": VOCABULARY,
            "block_size": CONTEXT,
            "max_tokens": TOKENS_A_GPU * processes,
        },
        "model": {**SIZES[size], "activation": "swiglu", "norm_type": "rms", "position": "rope"},
        "train": {"precision": "bf16", "parallel": parallel},
    }
    return Recipe.model_validate(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("--utilisation", type=float, default=0.4)
    chosen = parser.parse_args()
    peak = load_hardware(chosen.hardware).flops["bf16"]
    print(f"| parameters | layout | weights | gradients | Adam | bf16 copies | exchange | activations | total |")
    print("|---|---|---|---|---|---|---|---|---|")
    speeds = []
    for size, shape in SIZES.items():
        for parallel, processes in LAYOUTS:
            recipe = recipe_for(size, parallel, processes)
            with torch.device("meta"):
                model = model_for(recipe, VOCABULARY, VOCABULARY)
            found = memory(recipe, model, length=CONTEXT, processes=processes)
            cells = [f"{found[key] / 1e9:.1f}" for key in found]
            print(f"| {model.num_parameters() / 1e9:.2f}B | {parallel} x {processes} | " + " | ".join(cells) + " |")
        count = model.num_parameters()
        flops = 6 * count + 12 * shape["decoder_layers"] * shape["d_model"] * CONTEXT
        speeds.append((count, flops, chosen.utilisation * peak / flops))
    print(f"\n| parameters | FLOPs a token | tokens/s a GPU at {chosen.utilisation:.0%} of {chosen.hardware} |")
    print("|---|---|---|")
    for count, flops, speed in speeds:
        print(f"| {count / 1e9:.2f}B | {flops / 1e9:.1f} G | {speed:,.0f} |")


if __name__ == "__main__":
    main()
