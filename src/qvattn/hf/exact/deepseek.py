"""DeepSeek-V2 and V3: the latent is stored by transformers too, but expanded to all keys and values at every step.

Here a step of a few tokens folds the up-projection into the query and the output (DeepSeek-V2, arXiv 2405.04434):
views of `kv_b_proj.weight`, nothing is copied. The bytes stay those of the latent and the rotary key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from ...kernels import ScoreTerm, ValueTerm
from ...positions import Rotation
from ...streams import Stream
from ...variants.base import Streams, Terms
from .core import LeanAttention, not_plain


class LatentAttention(LeanAttention):
    """What V2 and V3 share; they differ in how the rotary parts turn."""

    def lean_refusal(self, tolerance: float) -> str | None:
        return not_plain(self, "kv_b_proj")

    def lean_streams(self) -> tuple[Stream, ...]:
        return (
            Stream(name="latent", heads=1, width=int(self.kv_lora_rank), scores=True, values=True),
            Stream(name="k_rope", heads=1, width=int(self.qk_rope_head_dim), scores=True),
        )

    def lean_elements_before(self) -> int:
        return int(self.kv_lora_rank) + int(self.qk_rope_head_dim)

    def lean_applied(self) -> str:
        return "latent, absorbed in steps of a few tokens"

    def _rotated(self, q: Tensor, k: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def lean_project(
        self, x: Tensor, kwargs: Mapping[str, Any], fresh: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        B, M, _ = x.shape
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_rope = (
            q.view(B, M, -1, self.qk_head_dim)
            .transpose(1, 2)
            .split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q_rope, k_rope = self._rotated(q_rope, k_rope[:, None], kwargs["position_embeddings"])
        return {"q": q, "q_rope": q_rope}, {"latent": self.kv_a_layernorm(latent)[:, None], "k_rope": k_rope}, None

    def lean_terms(
        self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None, values: Tensor | None, absorb: bool
    ) -> Terms:
        rope = ScoreTerm(q=q["q_rope"], stream=s["k_rope"])
        up = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        to_key, to_value = up.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        if absorb:
            score = ScoreTerm(q=q["q"] @ to_key, stream=s["latent"])
            return Terms([score, rope], ValueTerm(stream=s["latent"], lift=to_value.mT))
        made = self.kv_b_proj(s["latent"][:, 0]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = made.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return Terms([ScoreTerm(q=q["q"], stream=k), rope], ValueTerm(stream=v))

    def lean_output(self, o: Tensor, values_given: bool) -> Tensor:
        y: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return y


class LeanDeepseekV2Attention(LatentAttention, v2.DeepseekV2Attention):
    """Pairs of neighbours, turned as complex numbers."""

    def _rotated(self, q: Tensor, k: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
        turned: tuple[Tensor, Tensor] = v2.apply_rotary_emb(q, k, position_embeddings.to(q.device))
        return turned


class LeanDeepseekV3Attention(LatentAttention, v3.DeepseekV3Attention):
    """Halves or neighbours, as `rope_interleave` says."""

    def _rotated(self, q: Tensor, k: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
        turn = v3.apply_rotary_pos_emb_interleave if self.config.rope_interleave else v3.apply_rotary_pos_emb
        turned: tuple[Tensor, Tensor] = turn(q, k, *position_embeddings)
        return turned
