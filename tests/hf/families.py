"""Small random models of each family, with weights large enough that attention matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 61


def deepseek_v2(**changes: Any) -> PreTrainedConfig:
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return DeepseekV2Config(**(fields | changes))


def deepseek_v3(**changes: Any) -> PreTrainedConfig:
    fields = deepseek_v2().to_dict()
    wanted = {
        k: fields[k] for k in fields if k in DeepseekV3Config().to_dict() and k not in ("model_type", "rope_parameters")
    }
    return DeepseekV3Config(**(wanted | {"q_lora_rank": 12, "attention_bias": True} | changes))


CAUSAL: dict[str, Callable[..., PreTrainedConfig]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
}


def randomise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Weights with a spread of 1 / sqrt(fan in), biases and gains that are not their defaults."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() >= 2:
                p.copy_(noise * (1.3 / min(p.shape[-1], p.shape[-2]) ** 0.5 if "embed" not in name else 1.0))
            elif name.endswith("weight"):
                p.copy_(1 + 0.2 * noise)
            else:
                p.copy_(0.3 * noise)
    return model.eval()


def causal(name: str, implementation: str = "sdpa", seed: int = 1, **changes: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(CAUSAL[name](**changes), attn_implementation=implementation)
    return randomise(model, seed)
