"""Gemma 4 with `attention_k_eq_v`: global layers make keys and values of one projection, and transformers stores both.

    V = norm(x W),  K = rope(gain * norm(x W)) = rope(gain * V)

so V alone is stored, and K is rebuilt while it is read. Sliding layers (with their own V, and a window of tokens at
most) and layers that reuse the keys and values of an earlier one stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4 as gemma

from ...kernels import ScoreTerm, ValueTerm
from ...positions import Rotation
from ...streams import Stream
from ...variants.base import Streams, Terms
from .core import LeanAttention


class LeanGemma4Attention(LeanAttention, gemma.Gemma4TextAttention):
    lean_rotates_on_read = True

    def lean_keeps(self) -> str | None:
        if self.is_kv_shared_layer:
            return "it reuses the keys and values of an earlier layer"
        if self.is_sliding:
            return "a sliding window, whose keys and values have projections of their own"
        if not self.use_alternative_attention:
            return "attention_k_eq_v is off: keys and values have projections of their own"
        return None

    def lean_refusal(self, tolerance: float) -> str | None:
        if not self.is_causal:
            return "use_bidirectional_attention='all': there is no past to keep"
        return None

    def _shared_heads(self) -> int:
        return int(self.config.num_attention_heads // self.num_key_value_groups)

    def lean_streams(self) -> tuple[Stream, ...]:
        return (Stream(name="v", heads=self._shared_heads(), width=self.head_dim, scores=True, values=True),)

    def lean_elements_before(self) -> int:
        return 0 if self.is_kv_shared_layer else 2 * self._shared_heads() * int(self.head_dim)

    def lean_applied(self) -> str:
        return "V only, keys rebuilt on read as rope(gain * V)"

    def lean_turns(self) -> int:
        return int(self.head_dim)

    def lean_project(
        self, x: Tensor, kwargs: Mapping[str, Any], fresh: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        cos, sin = kwargs["position_embeddings"]
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        q = gemma.apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2).transpose(1, 2)
        v = self.v_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return {"q": q}, {"v": v}, None

    def lean_terms(
        self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None, values: Tensor | None, absorb: bool
    ) -> Terms:
        score = ScoreTerm(q=q["q"], stream=s["v"], gain=self.k_norm.weight, rotation=rotation)
        return Terms([score], ValueTerm(stream=s["v"]))

    def lean_attended(self, terms: Terms, kwargs: Mapping[str, Any]) -> None:
        """Layers that reuse these keys and values, and assistant models, want them as tensors, for this step."""
        asked = kwargs.get("return_shared_kv_states", False)
        if self.store_full_length_kv and (asked or "reuse" in self.config.kv_sharing_modes):
            kwargs["shared_kv_states"][self.layer_type] = terms.scores[0].keys(), terms.value.values()

    def lean_output(self, o: Tensor, values_given: bool) -> Tensor:
        y: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return y
