"""Small random models of each family, with weights large enough that attention matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 61
SPECIAL: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def deepseek_v2(**changes: Any) -> PreTrainedConfig:
    fields: dict[str, Any] = {
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
    }
    return DeepseekV2Config(**(fields | SPECIAL | changes))


def deepseek_v3(**changes: Any) -> PreTrainedConfig:
    fields = deepseek_v2().to_dict()
    wanted = {
        k: fields[k] for k in fields if k in DeepseekV3Config().to_dict() and k not in ("model_type", "rope_parameters")
    }
    return DeepseekV3Config(**(wanted | {"q_lora_rank": 12, "attention_bias": True} | changes))


def llama(**changes: Any) -> PreTrainedConfig:
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    return LlamaConfig(**(fields | SPECIAL | changes))


def llama_scaled(**changes: Any) -> PreTrainedConfig:
    """With biases and frequencies that are scaled (and whose cos and sin have a factor)."""
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
    return llama(**({"attention_bias": True, "rope_parameters": rope, "max_position_embeddings": 64} | changes))


def gpt_neox(**changes: Any) -> PreTrainedConfig:
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return GPTNeoXConfig(**(fields | SPECIAL | {"rope_parameters": rope} | changes))


def gpt2(**changes: Any) -> PreTrainedConfig:
    return GPT2Config(
        **(
            {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}
            | SPECIAL
            | {"scale_attn_by_inverse_layer_idx": True}
            | changes
        )
    )


def opt(**changes: Any) -> PreTrainedConfig:
    fields: dict[str, Any] = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return OPTConfig(**(fields | SPECIAL | {"word_embed_proj_dim": 32, "max_position_embeddings": 512} | changes))


def gemma4(**changes: Any) -> PreTrainedConfig:
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 7,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": False,
    }
    return Gemma4TextConfig(**(fields | SPECIAL | changes))


def gemma4_sharing(**changes: Any) -> PreTrainedConfig:
    """The last two layers reuse the keys and values of the two before them."""
    kinds = ["sliding_attention", "full_attention"] * 3
    inputs = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY}
    fields = {"num_hidden_layers": 6, "layer_types": kinds, "num_kv_shared_layers": 2}
    return gemma4(**(fields | inputs | changes))


CAUSAL: dict[str, Callable[..., PreTrainedConfig]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "gemma4": gemma4,
    "gemma4_sharing": gemma4_sharing,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "llama": llama,
    "llama_scaled": llama_scaled,
    "opt": opt,
}


def bart_like(kind: str, **changes: Any) -> PreTrainedConfig:
    fields: dict[str, Any] = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
        "forced_bos_token_id": None,
        "tie_word_embeddings": False,
    }
    if kind == "whisper":
        fields |= {"num_mel_bins": 6, "max_source_positions": 24, "max_target_positions": 64}
        fields |= {"begin_suppress_tokens": None, "suppress_tokens": None}
    return AutoConfig.for_model(kind, **(fields | SPECIAL | changes))


SEQ2SEQ = ("bart", "marian", "mbart", "pegasus", "whisper")


def seq2seq(kind: str, implementation: str = "sdpa", seed: int = 3, **changes: Any) -> PreTrainedModel:
    auto = AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM
    return randomise(auto.from_config(bart_like(kind, **changes), attn_implementation=implementation), seed)


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


def causal(name: str, implementation: str = "sdpa", seed: int = 3, **changes: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(CAUSAL[name](**changes), attn_implementation=implementation)
    return randomise(model, seed)
