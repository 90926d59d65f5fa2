"""Which lean class serves which architecture: one line each, imported when needed."""

from __future__ import annotations

from importlib import import_module

from .core import LeanAttention

ADAPTERS: dict[str, tuple[str, str]] = {
    "bart": ("cross", "LeanBartAttention"),
    "deepseek_v2": ("deepseek", "LeanDeepseekV2Attention"),
    "deepseek_v3": ("deepseek", "LeanDeepseekV3Attention"),
    "gemma4": ("gemma4", "LeanGemma4Attention"),
    "gemma4_text": ("gemma4", "LeanGemma4Attention"),
    "gpt2": ("gpt2", "LeanGPT2Attention"),
    "gpt_neox": ("gpt_neox", "LeanGPTNeoXAttention"),
    "llama": ("llama", "LeanLlamaAttention"),
    "marian": ("cross", "LeanMarianAttention"),
    "mbart": ("cross", "LeanMBartAttention"),
    "opt": ("opt", "LeanOPTAttention"),
    "pegasus": ("cross", "LeanPegasusAttention"),
    "whisper": ("cross", "LeanWhisperAttention"),
}
"""model_type -> (module of this package, class)."""


def adapter(model_type: str) -> type[LeanAttention]:
    module, name = ADAPTERS[model_type]
    found: type[LeanAttention] = getattr(import_module(f".{module}", __package__), name)
    return found
