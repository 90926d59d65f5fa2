"""What our two Hugging Face models share: loading that leaves nothing random, and the counts that reports show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..attention import Attention
from ..errors import UserError
from ..spec import AttentionSpec
from ..streams import StreamCache
from .block import Stack, Watched
from .card import write_card
from .generation import StreamGenerationMixin, stream_cache
from .objective import Objective
from .saved import check_saved


@dataclass
class QvattnOutput(ModelOutput):
    """loss: sum or mean over target tokens.  nll, correct, tokens: detached sums, unsmoothed.  logits: (B, T, V).

    cache (also readable as past_key_values): the cache given or made.  attention weights: per layer (B, H, M, T).
    hidden states: what enters the first layer, then what leaves each layer (the last norm not applied).
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    nll: Tensor | None = None
    correct: Tensor | None = None
    tokens: Tensor | None = None
    cache: Any = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class QvattnModel(PreTrainedModel, StreamGenerationMixin):
    """Base of TranslationModel and CausalLM."""

    base_model_prefix = ""
    supports_gradient_checkpointing = False
    tokenizer: Any = None
    """Where the model brought one along (`qvattn.hf.adopt`); saved with it, never used by it."""
    _no_split_modules = ("Block",)

    @property
    def decoder_stack(self) -> Stack:
        """The layers whose streams are cached."""
        raise TypeError(f"{type(self).__name__} must name its decoder stack")

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: constructors give every parameter a value, and `from_pretrained` refuses missing ones."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it, but a missing, unexpected or misshapen weight raises UserError naming it.

        Weights are read from safetensors files only, and no code that lies beside them is run.
        """
        if Path(pretrained_model_name_or_path).is_dir():
            config = kwargs.get("config")
            check_saved(cls, Path(pretrained_model_name_or_path), None if isinstance(config, str) else config)
        kwargs |= {"use_safetensors": True, "trust_remote_code": False}
        wants_info = kwargs.pop("output_loading_info", False)
        # a misshapen weight is reported with the others below, by name, instead of raising without one
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[kind]:
                names = ", ".join(sorted(str(k) for k in info[kind])[:5])
                raise UserError(f"{pretrained_model_name_or_path}: {kind.replace('_', ' ')}: {names}")
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers does it, with a model card where there is none, and the tokenizer the model brought along."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_card(self, Path(save_directory))
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(save_directory)

    def new_cache(self, batch_size: int, *, capacity: int = 64) -> StreamCache:
        """An empty cache for the decoder's layers, in the model's dtype and on its device."""
        return StreamCache(
            self.decoder_stack.cache_layers, batch_size, capacity=capacity, dtype=self.dtype, device=self.device
        )

    @property
    def attention_spec(self) -> AttentionSpec:
        """The spec of the attention whose streams grow with every token: the lowest layer's, where layers differ."""
        return self.decoder_stack.spec

    def cache_elements_per_token(self) -> int:
        """Elements cached per generated token over all layers."""
        return self.decoder_stack.cache_elements_per_token

    def cache_elements_per_token_layer(self) -> int:
        """Elements cached per generated token in one layer that owns its streams: the widest, where layers differ."""
        return max(spec.cache_elements_per_token for spec in self.decoder_stack.specs)

    def attention_parameters(self) -> int:
        """Parameters of all attention layers, position schemes included."""
        return sum(p.numel() for m in self.modules() if isinstance(m, Attention) for p in m.parameters())

    @staticmethod
    def _watched(attentions: bool, hidden_states: bool) -> Watched | None:
        return Watched(keep_weights=attentions) if attentions or hidden_states else None

    def _cache_for(self, ids: Tensor, cache: Any, use_cache: bool | None) -> Any:
        """The cache of a forward pass over new tokens (B, M): the given one, or an empty one if `use_cache` asks.

        Entries are stored without gradients, so none is made while gradients are recorded.
        """
        streams = stream_cache(cache)
        if streams is not None and streams.batch_size != ids.shape[0]:
            raise UserError(
                f"ids have {ids.shape[0]} rows, the cache has {streams.batch_size}; reorder the cache first"
            )
        if cache is None and use_cache and not torch.is_grad_enabled():
            return self.new_cache(ids.shape[0])
        return cache

    @staticmethod
    def _output(objective: Objective, reduction: str, **more: Any) -> QvattnOutput:
        if reduction not in ("sum", "mean"):
            raise UserError(f"reduction={reduction!r}: allowed are sum, mean")
        loss = objective.loss if reduction == "sum" else objective.loss / objective.tokens.clamp(min=1)
        return QvattnOutput(loss=loss, nll=objective.nll, correct=objective.correct, tokens=objective.tokens, **more)
