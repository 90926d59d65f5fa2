"""Encoder-decoder Transformer for translation (arXiv 1706.03762) with any attention in its three places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..streams import StreamCache
from .base import QvattnModel, QvattnOutput
from .block import Memory, Stack, Watched, positions_of
from .config import TranslationConfig
from .generation import EncoderOutput, SourceEncoder, continued_positions, stream_cache
from .objective import token_objective


class TranslationModel(QvattnModel):
    """source ids -> target logits. The target embedding is also the output projection."""

    config_class = TranslationConfig
    main_input_name = "input_ids"

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__(config)
        pad = config.pad_token_id
        self.target_embedding = nn.Embedding(config.target_vocab_size, config.d_model, padding_idx=pad)
        if not config.share_embeddings:
            self.source_embedding = nn.Embedding(config.source_vocab_size, config.d_model, padding_idx=pad)
        self.encoder = Stack(config, config.encoder_specs)
        self.decoder = Stack(config, config.decoder_specs, config.cross_specs, config.share_every)
        self.post_init()
        if self.generation_config is not None:
            self.generation_config.suppress_tokens = [pad]  # padding is not a word; the lean loops say the same

    @property
    def decoder_stack(self) -> Stack:
        return self.decoder

    def get_input_embeddings(self) -> nn.Module:
        return self.target_embedding if self.config.share_embeddings else self.source_embedding

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None, watched: Watched | None = None) -> Tensor:
        """Source ids (B, S) and mask (B, S) of real tokens (default: all but padding) -> (B, S, E)."""
        positions = self.source_positions(input_ids, attention_mask)
        return self.encoder(self.get_input_embeddings()(input_ids), positions, watched=watched)

    def source_positions(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Positions (B, S), -1 for padding."""
        return positions_of(input_ids != self.config.pad_token_id if attention_mask is None else attention_mask)

    def remember(self, encoded: Tensor, positions: Tensor) -> Memory:
        """The cross-attention streams of every decoder layer over encoded sources (B, S, E), made once."""
        return Memory(positions, [block.cross_attn.memory_streams(encoded) for block in self.decoder.blocks()])

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        memory: Memory,
        cache: StreamCache | None = None,
        watched: Watched | None = None,
    ) -> Tensor:
        """Target ids (B * k, M) at positions (B * k, M) over the memory of B sources -> hidden (B * k, M, E)."""
        return self.decoder(self.target_embedding(ids), positions, cache=cache, memory=memory, watched=watched)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., E) -> (..., V)."""
        return hidden @ self.target_embedding.weight.mT

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
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
        """Teacher-forced pass, or (with a cache) a pass over new target tokens.

        input_ids: (B, S).  attention_mask: (B, S), 1 for real tokens.  decoder_input_ids: (B * k, T), beginning with
        the start token or continuing the cache; the k rows of a source stand together; default: `labels` shifted right.
        labels: (B, T), -100 at padding; gives loss, nll, correct and tokens.  label_smoothing: of `loss` only.
        reduction: "sum" or "mean" of `loss` over target tokens.  return_logits: also with labels (they are made for
        real tokens only otherwise).
        decoder_attention_mask: (B * k, T) of the new tokens, or of all with those in the cache.
        encoder_outputs: from an earlier pass over the sources (`encode_sources`), instead of input_ids.
        cache (or past_key_values): a StreamCache of B * k rows.  use_cache: make one, when no gradients are recorded.
        output_attentions, output_hidden_states: see QvattnOutput; attention then comes from the reference kernel.
        logits_to_keep: logits of the last so many tokens only; 0: all.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise UserError("decoder_input_ids=None: give target tokens, or labels to shift")
            decoder_input_ids = self.shift_right(labels)
        keep = {"output_attentions": bool(output_attentions), "output_hidden_states": bool(output_hidden_states)}
        if encoder_outputs is None:
            if input_ids is None:
                raise UserError("input_ids=None: the model needs source tokens, or encoder_outputs")
            encoder_outputs = self.encode_sources(input_ids, attention_mask, **keep)
        cache = self._cache_for(decoder_input_ids, past_key_values if cache is None else cache, use_cache)
        streams, watched = stream_cache(cache), self._watched(*keep.values())
        hidden = self.decode(
            decoder_input_ids,
            continued_positions(self._real(decoder_input_ids, decoder_attention_mask, streams), streams),
            self._memory(encoder_outputs, attention_mask),
            streams,
            watched,
        )
        more = {
            "logits": self.logits(hidden[:, -logits_to_keep:]) if labels is None or return_logits else None,
            "cache": cache,
            "encoder_last_hidden_state": encoder_outputs[0],
            "encoder_attentions": getattr(encoder_outputs, "attentions", None),
            "encoder_hidden_states": getattr(encoder_outputs, "hidden_states", None),
        }
        if watched is not None:
            more["decoder_hidden_states"] = tuple(watched.hidden) if output_hidden_states else None
            more["decoder_attentions"] = tuple(watched.self_weights) or None
            more["cross_attentions"] = tuple(watched.cross_weights) or None
        if labels is None:
            return QvattnOutput(**more)
        objective = token_objective(hidden, self.target_embedding.weight, labels, label_smoothing)
        return self._output(objective, reduction, **more)

    def encode_sources(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> EncoderOutput:
        """Everything about sources (B, S) that the decoder needs, made once; see `forward`'s encoder_outputs."""
        watched = self._watched(output_attentions, output_hidden_states)
        encoded = self.encode(input_ids, attention_mask, watched)
        return EncoderOutput(
            last_hidden_state=encoded,
            hidden_states=tuple(watched.hidden) if watched is not None and output_hidden_states else None,
            attentions=tuple(watched.self_weights) or None if watched is not None else None,
            memory=self.remember(encoded, self.source_positions(input_ids, attention_mask)),
        )

    def get_encoder(self, modality: str | None = None) -> Any:
        """What `generate()` calls to encode the sources."""
        return SourceEncoder(self.encode_sources)

    def _memory(self, encoder_outputs: Any, attention_mask: Tensor | None) -> Memory:
        memory: Memory | None = getattr(encoder_outputs, "memory", None)
        if memory is None:
            encoded: Tensor = encoder_outputs[0]
            mask = encoded.new_ones(encoded.shape[:2]) if attention_mask is None else attention_mask
            memory = self.remember(encoded, positions_of(mask))
        return memory

    def _real(self, decoder_ids: Tensor, mask: Tensor | None = None, cache: StreamCache | None = None) -> Tensor:
        """Which new target tokens (B, M) are not padding; the first of all is real whatever its id."""
        if mask is not None:
            return mask[:, -decoder_ids.shape[1] :] > 0
        real = decoder_ids != self.config.pad_token_id
        if cache is None or cache.length == 0:
            real[:, 0] = True
        return real

    def shift_right(self, labels: Tensor) -> Tensor:
        """Decoder input (B, T) for labels (B, T): the start token, then the labels but the last."""
        start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
        shifted = torch.cat((start, labels[:, :-1]), dim=1)
        return torch.where(shifted < 0, self.config.pad_token_id, shifted)
