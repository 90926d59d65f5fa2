"""Value-only attention: the query meets the value itself (arXiv 2603.15665; "Q-K=V" in 2606.04032).

    score_h = q_h . v_head(h);  value = v_head(h)

V is cached as it is; with RoPE the score rotates it on read, so that the summed value stays free of position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..kernels.terms import ScoreTerm, ValueTerm
from ..positions.base import Rotation
from ..streams import Stream
from .base import Streams, Terms, Variant, default_shared_heads

if TYPE_CHECKING:
    from ..spec import AttentionSpec


class QV(Variant):
    """One value head per query head, no keys."""

    also_called = "Q.V, Q-K=V"

    @classmethod
    def value_heads(cls, spec: AttentionSpec) -> int:
        return spec.v_heads or spec.n_heads

    @classmethod
    def streams(cls, spec: AttentionSpec) -> tuple[Stream, ...]:
        return (Stream(name="v", heads=cls.value_heads(spec), width=spec.d_head, scores=True, values=True),)

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.v_heads = self.value_heads(spec)
        self.v_proj = self.linear(spec.d_model, self.v_heads * spec.d_head)

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        return {"v": self.heads(self.v_proj(x), self.v_heads)}

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        groups = self.spec.groups_of(self.v_heads)
        score = ScoreTerm(q=q["q"], stream=s["v"], groups=groups, rotation=rotation)
        return Terms([score], ValueTerm(stream=s["v"], groups=groups))


class QVGQA(QV):
    """Groups of query heads share a value head, no keys."""

    also_called = "GQA without keys"

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        return {"v_heads": default_shared_heads(spec), "groups": None}


class QVMQA(QV):
    """All query heads share one value head, no keys."""

    also_called = "MQA without keys"

    @classmethod
    def value_heads(cls, spec: AttentionSpec) -> int:
        return 1
