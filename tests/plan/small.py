"""Small real models of the families that the planner reads, and the bytes their caches really hold."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MANY = ("cohere", "cohere2", "exaone4", "gemma2", "granite", "nemotron", "olmo2", "phi", "smollm3")
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    **SPARSE,
}
DELTA = {
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
DELTA_SPARSE = DELTA | SPARSE | {"num_experts": 4, "shared_expert_intermediate_size": 32}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama grouped": ("llama", {}),
    "llama square": ("llama", {"num_key_value_heads": 4}),
    "mistral window": ("mistral", {"sliding_window": 5, "head_dim": 24}),
    "mistral wide window": ("mistral", {"sliding_window": 64}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3 odd head": ("qwen3", {"head_dim": 24}),
    "qwen3 moe": ("qwen3_moe", {"num_experts": 4, **SPARSE}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 24,
            "sliding_window": 5,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        },
    ),
    "gemma4 k = v": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 shared": ("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 2}),
    "gpt-oss": ("gpt_oss", {"head_dim": 24, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4 chunks": (
        "llama4_text",
        {
            "head_dim": 16,
            "attention_chunk_size": 6,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
        },
    ),
    "deepseek v2": ("deepseek_v2", LATENT),
    "deepseek v3": ("deepseek_v3", LATENT),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt-neox": ("gpt_neox", {}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "gpt-bigcode": ("gpt_bigcode", {"multi_query": True}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {"expansion_ratio": 2, "max_seq_len": 64}),
    "falcon multi-query": ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
    "falcon new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon alibi": ("falcon", {"multi_query": False, "alibi": True}),
    "qwen3-next": ("qwen3_next", DELTA_SPARSE),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 24}),
    "lfm2": ("lfm2", {"full_attn_idxs": [1, 3]}),
    "mamba": ("mamba", {"state_size": 6}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 6, "n_groups": 2}),
    **{name: (name, {"sliding_window": 5} if name in ("cohere2", "exaone4", "gemma2") else {}) for name in MANY},
}


def config_of(case: str) -> Any:
    kind, fields = CASES[case]
    cls = CONFIG_MAPPING[kind]
    known = cls()
    common = {name: value for name, value in COMMON.items() if name in vars(known) or name in cls.attribute_map}
    return cls(**(common | fields))


def measured_bytes(config: Any, tokens: int, batch: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes in the library's own cache after a forward pass of `batch` rows of `tokens` tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        out = model(input_ids=torch.randint(3, 60, (batch, tokens)), use_cache=True)
    cache = next(c for name in ("cache", "past_key_values", "cache_params") if (c := getattr(out, name, None)))
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in _tensors(layer))


def _tensors(layer: Any) -> list[torch.Tensor]:
    growing = [getattr(layer, name, None) for name in ("keys", "values")]
    states = [t for name in ("conv_states", "recurrent_states") for t in (getattr(layer, name, None) or {}).values()]
    return [t for t in (*growing, *states) if t is not None]
