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
        self.encoder = Stack(config, config.encoder_layers, config.encoder_spec)
        self.decoder = Stack(config, config.decoder_layers, config.decoder_spec, config.cross_spec, config.share_every)
        self.post_init()

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
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        return_logits: bool = False,
        **unused: Any,
    ) -> QvattnOutput:
        """Teacher-forced pass.

        input_ids: (B, S).  attention_mask: (B, S), 1 for real tokens.  decoder_input_ids: (B, T), beginning with the
        start token; default: `labels` shifted right.  labels: (B, T), -100 at padding; gives loss, nll, correct and
        tokens.  label_smoothing: of `loss` only.  reduction: "sum" or "mean" of `loss` over target tokens.
        return_logits: also with labels (they are made for real tokens only otherwise).
        """
        if input_ids is None:
            raise UserError("input_ids=None: the model needs source tokens")
        if decoder_input_ids is None:
            if labels is None:
                raise UserError("decoder_input_ids=None: give target tokens, or labels to shift")
            decoder_input_ids = self.shift_right(labels)
        encoded = self.encode(input_ids, attention_mask)
        memory = self.remember(encoded, self.source_positions(input_ids, attention_mask))
        positions = positions_of(self._real(decoder_input_ids))
        hidden = self.decode(decoder_input_ids, positions, memory)
        logits = self.logits(hidden) if labels is None or return_logits else None
        if labels is None:
            return QvattnOutput(logits=logits, encoder_last_hidden_state=encoded)
        objective = token_objective(hidden, self.target_embedding.weight, labels, label_smoothing)
        return self._output(objective, reduction, logits=logits, encoder_last_hidden_state=encoded)

    def _real(self, decoder_ids: Tensor) -> Tensor:
        """Mask (B, T) of target tokens that are not padding; the first token is real whatever its id."""
        real = decoder_ids != self.config.pad_token_id
        real[:, 0] = True
        return real

    def shift_right(self, labels: Tensor) -> Tensor:
        """Decoder input (B, T) for labels (B, T): the start token, then the labels but the last."""
        start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
        shifted = torch.cat((start, labels[:, :-1]), dim=1)
        return torch.where(shifted < 0, self.config.pad_token_id, shifted)
