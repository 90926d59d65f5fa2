"""Small models with lively random weights, and batches of mixed lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qvattn import UserError
from qvattn.models import CausalLM, CausalLMConfig, QvattnModel, TranslationConfig, TranslationModel, initialise
from qvattn.positions import POSITIONS
from qvattn.variants import VARIANTS
from qvattn.variants.slim import Slim

VOCABULARY = 40
ENDS = [2, 7, 11, 19]
"""Several tokens end a row, so that random models end some rows early and others late."""
COMMON: dict[str, Any] = {"d_model": 16, "d_ff": 32, "n_heads": 4, "dropout": 0.0}


def possible(variant: str, position: str) -> bool:
    try:
        translation(variant, position)
    except UserError:
        return False
    return True


def translation(attention: Any = "qv-ka", position: Any = "agf+pcm-v", **fields: Any) -> TranslationModel:
    sizes = {"source_vocab_size": VOCABULARY, "target_vocab_size": VOCABULARY, "encoder_layers": 1, "decoder_layers": 2}
    config = TranslationConfig(**COMMON | sizes | {"attention": attention, "position": position} | fields)
    return lively(TranslationModel(config))


def language(attention: Any = "qv-ka", position: Any = "agf+pcm-v", **fields: Any) -> CausalLM:
    sizes = {"vocab_size": VOCABULARY, "layers": 2}
    return lively(CausalLM(CausalLMConfig(**COMMON | sizes | {"attention": attention, "position": position} | fields)))


def lively(model: Any) -> Any:
    """Larger weights than at the start of training, so that the next token depends on the past.

    The key matrix of `slim`, which is inverted, is orthogonal: the inverse of a random one amplifies rounding.
    """
    initialise(model, 3)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "position" not in name:
                p.mul_(1.6)
        for module in model.modules():
            if isinstance(module, Slim):
                torch.nn.init.orthogonal_(module.k_proj.weight, gain=1.6, generator=generator)
    return model.eval()


def ends(model: QvattnModel) -> QvattnModel:
    model.generation_config.eos_token_id = ENDS
    return model


def sources(lengths: tuple[int, ...] = (8, 2, 5), seed: int = 1) -> tuple[Tensor, Tensor]:
    """ids, mask (B, S), padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def prompts(lengths: tuple[int, ...] = (2, 6), seed: int = 1) -> tuple[Tensor, Tensor]:
    """ids, mask (B, S), padded on the left; row i holds the first lengths[i] tokens of solo row i."""
    ids, mask = sources(lengths, seed)
    longest = ids.shape[1]
    shifted = torch.stack([row.roll(longest - n) for row, n in zip(ids, lengths, strict=True)])
    return shifted, torch.stack([row.roll(longest - n) for row, n in zip(mask, lengths, strict=True)])


def until_end(rows: Tensor, fill: int = 0) -> Tensor:
    """rows (N, L) with everything after the first end replaced by `fill` (transformers pads beams with an end)."""
    ended = torch.isin(rows, torch.tensor(ENDS)).long()
    return rows.masked_fill(ended.cumsum(1) - ended > 0, fill)


COMBINATIONS = [(v, p) for v in VARIANTS for p in POSITIONS if possible(v, p)]
FEW = [(v, p) for v, p in COMBINATIONS if p in ("rope", "agf+pcm-v") or v == "qv-ka"]
