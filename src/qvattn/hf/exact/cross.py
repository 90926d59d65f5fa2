"""Cross-attention of BART, Marian, Whisper and their kin over the encoder's output itself.

    q . K = q . (x W_K + b_K) = (q W_K^T) . x + q . b_K        the last term is the same for all keys: softmax drops it
    sum a V = (sum a x) W_V + b_V                              the weights a sum to 1

so neither keys nor values are stored, and nothing is inverted: this is exact for any weights. A step of few queries
folds both projections; many queries rebuild keys and values for that call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.bart import modeling_bart as bart
from transformers.models.marian import modeling_marian as marian
from transformers.models.mbart import modeling_mbart as mbart
from transformers.models.pegasus import modeling_pegasus as pegasus
from transformers.models.whisper import modeling_whisper as whisper

from ...errors import UserError
from ...kernels import ScoreTerm, ValueTerm
from ...models.generation import CACHE_NAME
from ...streams import Stream
from ...variants.base import Terms
from .core import LeanAttention, lean_attend, not_plain
from .sources import Source, source_of


class CrossAttention(LeanAttention):
    """Serves the modules named `encoder_attn`; the decoder's self-attention stays as it is."""

    lean_shared_memory = True

    @classmethod
    def lean_serves(cls, name: str) -> bool:
        return name.rpartition(".")[2] == "encoder_attn"

    def lean_refusal(self, tolerance: float) -> str | None:
        return not_plain(self, "k_proj", "v_proj")

    @property
    def lean_dropout(self) -> float:
        return float(self.dropout) if self.training else 0.0

    def lean_streams(self) -> tuple[Stream, ...]:
        return (Stream(name="source", heads=1, width=int(self.embed_dim), scores=True, values=True),)

    def lean_elements_before(self) -> int:
        return 2 * int(self.embed_dim)

    def lean_applied(self) -> str:
        return "the encoder's output, once for all layers and for the beams of a source"

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache, given = kwargs.get(CACHE_NAME), kwargs.get("key_value_states")
        if given is None or not isinstance(cache, EncoderDecoderCache):
            return super(LeanAttention, self).forward(hidden_states, *args, **kwargs)
        source = source_of(cache, self, int(self.layer_idx), self.lean_plan.first, given)
        B, M, _ = hidden_states.shape
        geometry = source.geometry(kwargs.get("attention_mask"), M)
        S = source.states.shape[0]
        if S * source.beams != B:
            raise UserError(f"the input has {B} rows, the source cache has {S * source.beams}")
        q = self.q_proj(hidden_states).view(S, source.beams * M, self.num_heads, self.head_dim).transpose(1, 2)
        terms = self._lean_terms(q, source)
        o, weights = lean_attend(self, terms, geometry, scale=self.head_dim**-0.5, dropout=self.lean_dropout)
        if terms.value.lift is not None and self.v_proj.bias is not None:
            o = o + self.v_proj.bias.view(self.num_heads, 1, self.head_dim)
        if weights is not None:
            weights = weights.unflatten(2, (source.beams, M)).transpose(1, 2).flatten(0, 1)
        return self.out_proj(o.transpose(1, 2).reshape(B, M, -1)), weights

    def _lean_terms(self, q: Tensor, source: Source) -> Terms:
        """Folding costs the width E per query, head and token; rebuilding costs it per token and output element."""
        x = source.states
        heads = (self.num_heads, self.head_dim)
        if q.shape[2] < self.head_dim and not torch.is_grad_enabled():
            to_key, to_value = (p.weight.unflatten(0, heads) for p in (self.k_proj, self.v_proj))
            return Terms([ScoreTerm(q=q @ to_key, stream=x[:, None])], ValueTerm(stream=x[:, None], lift=to_value.mT))
        k, v = (p(x).unflatten(-1, heads).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        return Terms([ScoreTerm(q=q, stream=k)], ValueTerm(stream=v))


class LeanBartAttention(CrossAttention, bart.BartAttention):
    pass


class LeanMarianAttention(CrossAttention, marian.MarianAttention):
    pass


class LeanMBartAttention(CrossAttention, mbart.MBartAttention):
    pass


class LeanPegasusAttention(CrossAttention, pegasus.PegasusAttention):
    pass


class LeanWhisperAttention(CrossAttention, whisper.WhisperAttention):
    pass
