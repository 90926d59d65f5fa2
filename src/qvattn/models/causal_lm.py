"""Decoder-only language model: RMSNorm, SwiGLU or GELU, any variant and position scheme."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..streams import StreamCache
from .base import QvattnModel, QvattnOutput
from .block import Stack, Watched
from .config import CausalLMConfig
from .generation import continued_positions, stream_cache
from .objective import IGNORED, token_objective


class CausalLM(QvattnModel):
    """Token ids -> logits of the next token."""

    config_class = CausalLMConfig
    main_input_name = "input_ids"

    def __init__(self, config: CausalLMConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.decoder = Stack(config, config.decoder_specs, share_every=config.share_every)
        self.post_init()

    @property
    def decoder_stack(self) -> Stack:
        return self.decoder

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    @property
    def output_weight(self) -> Tensor:
        """(V, E)."""
        tied: bool = self.config.tie_word_embeddings
        return self.embedding.weight if tied else self.lm_head.weight

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: StreamCache | None = None, watched: Watched | None = None
    ) -> Tensor:
        """Ids (B, M) at positions (B, M), -1 for padding -> hidden states (B, M, E)."""
        return self.decoder(self.embedding(ids), positions, cache=cache, watched=watched)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., E) -> (..., V)."""
        return hidden @ self.output_weight.mT

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        return_logits: bool = False,
        **unused: Any,
    ) -> QvattnOutput:
        """input_ids (B, T) -> logits (B, T, V), or the objective when labels are given.

        attention_mask: (B, T), 1 for real tokens, padding on either side; with a cache, of the new tokens alone or of
        all with those in the cache.  labels: (B, T) aligned with input_ids (the Hugging Face convention: the model
        shifts them), -100 ignored.  The rest as in `TranslationModel.forward`.
        """
        if input_ids is None:
            raise UserError("input_ids=None: the model needs tokens")
        cache = self._cache_for(input_ids, past_key_values if cache is None else cache, use_cache)
        streams, watched = stream_cache(cache), self._watched(bool(output_attentions), bool(output_hidden_states))
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        hidden = self.hidden(input_ids, continued_positions(real > 0, streams), streams, watched)
        more = {
            "logits": self.logits(hidden[:, -logits_to_keep:]) if labels is None or return_logits else None,
            "cache": cache,
        }
        if watched is not None:
            more["hidden_states"] = tuple(watched.hidden) if output_hidden_states else None
            more["attentions"] = tuple(watched.self_weights) or None
        if labels is None:
            return QvattnOutput(**more)
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        objective = token_objective(hidden, self.output_weight, targets, label_smoothing)
        return self._output(objective, reduction, **more)
