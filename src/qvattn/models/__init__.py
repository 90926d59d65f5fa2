"""Hugging Face models over our attention, and their paired initialisation."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from .base import QvattnModel, QvattnOutput
from .block import Memory, Stack, Watched, initialise, positions_of
from .causal_lm import CausalLM
from .config import CausalLMConfig, TranslationConfig
from .objective import IGNORED, Objective, token_objective
from .translation import TranslationModel

for _config, _model, _auto in (
    (TranslationConfig, TranslationModel, AutoModelForSeq2SeqLM),
    (CausalLMConfig, CausalLM, AutoModelForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    _auto.register(_config, _model, exist_ok=True)

__all__ = [
    "IGNORED",
    "CausalLM",
    "CausalLMConfig",
    "Memory",
    "Objective",
    "QvattnModel",
    "QvattnOutput",
    "Stack",
    "TranslationConfig",
    "TranslationModel",
    "Watched",
    "initialise",
    "positions_of",
    "token_objective",
]
