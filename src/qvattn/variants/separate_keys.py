"""Separate keys and values: MHA (arXiv 1706.03762), GQA (2305.13245), MQA (1911.02150), shared V, thin keys.

    score_h = q_h . k_head(h);  value = v_head(h)      (thin keys: arXiv 2603.04427)

One class; the presets differ in how many heads and how wide a head K and V have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..kernels.terms import ScoreTerm, ValueTerm
from ..positions.base import Rotation, rotate
from ..streams import Stream
from .base import Streams, Terms, Variant, default_shared_heads

if TYPE_CHECKING:
    from ..spec import AttentionSpec


class MHA(Variant):
    """One key and one value head per query head; K rotated at write."""

    also_called = "QKV"
    stream_parameters: ClassVar[tuple[str, ...]] = ("k_proj", "v_proj", "k_head_norm")

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        return {"d_key": spec.d_head, "d_value": spec.d_head, "qk_norm": None}

    @classmethod
    def shared_heads(cls, spec: AttentionSpec) -> tuple[int, int]:
        """Heads of K and of V."""
        return spec.k_heads or spec.n_heads, spec.v_heads or spec.n_heads

    @classmethod
    def streams(cls, spec: AttentionSpec) -> tuple[Stream, ...]:
        k_heads, v_heads = cls.shared_heads(spec)
        assert spec.d_key and spec.d_value
        return (
            Stream(name="k", heads=k_heads, width=spec.d_key, scores=True),
            Stream(name="v", heads=v_heads, width=spec.d_value, values=True),
        )

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        assert spec.d_key and spec.d_value
        self.k_heads, self.v_heads = self.shared_heads(spec)
        self.k_proj = self.linear(spec.d_model, self.k_heads * spec.d_key)
        self.v_proj = self.linear(spec.d_model, self.v_heads * spec.d_value)
        self.k_head_norm = self.head_norm(spec.d_key)

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        k = self.k_head_norm(self.heads(self.k_proj(x), self.k_heads))
        return {"k": rotate(k, rotation), "v": self.heads(self.v_proj(x), self.v_heads)}

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        score = ScoreTerm(q=q["q"], stream=s["k"], groups=self.spec.groups_of(self.k_heads))
        return Terms([score], ValueTerm(stream=s["v"], groups=self.spec.groups_of(self.v_heads)))


class GQA(MHA):
    """Groups of query heads share a key and a value head."""

    also_called = "grouped-query"

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        shared = (not spec.groups and (spec.v_heads or spec.k_heads)) or default_shared_heads(spec)
        return {"k_heads": shared, "v_heads": shared, "groups": None} | super().defaults(spec)


class MQA(MHA):
    """All query heads share one key and one value head."""

    also_called = "multi-query"

    @classmethod
    def shared_heads(cls, spec: AttentionSpec) -> tuple[int, int]:
        return 1, 1


class SharedV(MHA):
    """V shared by groups of query heads, one key per query head."""

    also_called = "one key per query head"

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        shared = default_shared_heads(spec)
        return {"v_heads": shared, "groups": None} | super().defaults(spec)


class ThinKey(GQA):
    """Keys thinner than values: the match needs fewer dimensions than the content."""

    also_called = "low-dimensional keys"

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        shared = len(spec.groups) if spec.groups else spec.v_heads or spec.k_heads or spec.n_heads
        thin = {"k_heads": shared, "v_heads": shared, "d_key": max(1, min(2, spec.d_head - 1), spec.d_head // 8 * 2)}
        return super().defaults(spec) | thin

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        assert spec.d_key and spec.d_value
        if spec.d_key >= spec.d_value:
            return f"d_key={spec.d_key}: thin keys are thinner than d_value={spec.d_value}; otherwise use gqa or mha"
        return None
