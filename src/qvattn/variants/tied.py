"""Grouped tied attention (arXiv 2505.21487): keys and values share most of what they store.

    score_h = q_h^nope . T_head(h)[: D - P] + q_h^rope . k_rope;   value = T_head(h)

The tied stream T is summed whole and scores with its first part, which is never rotated; a single-head rotary key of
`rope_dim` (P) elements, shared by all heads, gives the rest of the score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..kernels.terms import ScoreTerm, ValueTerm
from ..positions import Rotation, rotate
from ..streams import Stream
from .base import Streams, Terms, Variant, default_shared_heads

if TYPE_CHECKING:
    from ..spec import AttentionSpec


class GTA(Variant):
    """Tied heads shared by groups of query heads, and one rotary key head. Without RoPE that head is not rotated."""

    also_called = "grouped tied attention"
    stream_parameters: ClassVar[tuple[str, ...]] = ("v_proj", "k_rope_proj")

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        return {
            "v_heads": default_shared_heads(spec),
            "rope_dim": max(1, min(2, spec.d_head - 1), spec.d_head // 4 * 2),
            "groups": None,
        }

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        if not 0 < (spec.rope_dim or 0) < spec.d_head:
            return (
                f"rope_dim={spec.rope_dim}: the tied stream scores with the other d_head - rope_dim elements; "
                f"allowed is 1 to {spec.d_head - 1} (without a rotary part this is qv-gqa)"
            )
        return None

    @classmethod
    def streams(cls, spec: AttentionSpec) -> tuple[Stream, ...]:
        assert spec.v_heads and spec.rope_dim
        return (
            Stream(name="tied", heads=spec.v_heads, width=spec.d_head, scores=True, values=True),
            Stream(name="k_rope", heads=1, width=spec.rope_dim, scores=True),
        )

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        assert spec.v_heads and spec.rope_dim
        self.v_heads, self.rope_dim = spec.v_heads, spec.rope_dim
        self.v_proj = self.linear(spec.d_model, spec.v_heads * spec.d_head)
        self.k_rope_proj = self.linear(spec.d_model, spec.rope_dim)

    def queries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        q = self.heads(self.q_proj(x), self.n_heads)
        q, q_rope = q.split([self.spec.d_head - self.rope_dim, self.rope_dim], dim=-1)
        return {"q": q, "q_rope": rotate(q_rope, rotation)}

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        tied = self.heads(self.v_proj(x), self.v_heads)
        return {"tied": tied, "k_rope": rotate(self.k_rope_proj(x)[:, None], rotation)}

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        groups = self.spec.groups_of(self.v_heads)
        scores = [
            ScoreTerm(q=q["q"], stream=s["tied"], groups=groups),
            ScoreTerm(q=q["q_rope"], stream=s["k_rope"]),
        ]
        return Terms(scores, ValueTerm(stream=s["tied"], groups=groups))
