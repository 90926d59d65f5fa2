"""Small random models of ours whose keys are what a conversion can represent exactly, and windows of token ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qvattn.models import CausalLM, CausalLMConfig, initialise
from qvattn.variants.separate_keys import MHA

VOCABULARY = 61


def model(seed: int = 0, **fields: Any) -> CausalLM:
    """4 query heads of 4 elements over 2 shared heads, 3 layers."""
    attention = {"variant": "gqa", "k_heads": 2, "v_heads": 2} | fields.pop("attention", {})
    config = CausalLMConfig(
        **{"vocab_size": VOCABULARY, "d_model": 16, "d_ff": 24, "n_heads": 4, "layers": 3, "dropout": 0.0} | fields,
        attention=attention,
    )
    made = CausalLM(config).eval()
    initialise(made, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator) * p.abs().mean().clamp_min(0.1))
    return made


def windows(count: int = 6, length: int = 32, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


def layers(made: CausalLM) -> list[MHA]:
    found = [block.self_attn.variant for block in made.decoder_stack.blocks()]
    assert all(isinstance(one, MHA) for one in found)
    return found  # type: ignore[return-value]


@torch.no_grad()
def make_keys_from(made: CausalLM, rank: int, source: str, seed: int = 5) -> None:
    """Rewrite every key projection as a mixture of `rank` directions, and of the own, all or no values."""
    generator = torch.Generator().manual_seed(seed)
    for variant in layers(made):
        width, wide = variant.k_proj.weight.shape
        directions = torch.randn(rank, wide, generator=generator) * wide**-0.5
        keys = torch.randn(width, rank, generator=generator) @ directions * rank**-0.5
        v = variant.v_proj.weight
        if source == "all":
            keys += torch.randn(width, len(v), generator=generator) @ v * len(v) ** -0.5
        elif source == "own":
            d = width // variant.k_heads
            for h in range(variant.k_heads):
                mix = torch.randn(d, d, generator=generator) * d**-0.5
                keys[h * d : (h + 1) * d] += mix @ v[h * d : (h + 1) * d]
        variant.k_proj.weight.copy_(keys)
