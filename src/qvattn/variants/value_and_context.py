"""QV-Ka: the key is made from the value and a small context (arXiv 2603.15665).

    K_h = [G; V_h] W_h,  W_h = [W_G; W_V];   q . K_h = (q W_G^T) . G + (q W_V^T) . V_h

Only V and G are cached. `expand` materialises K_h; `absorb` folds W_h into the query, which is exact while nothing
stands between W_h and the dot product: RoPE would, so with it keys are rebuilt and rotated on read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.terms import ScoreTerm, ValueTerm, per_query_head
from ..positions.base import Rotation, rotate
from ..streams import Stream
from .base import Streams, Terms, Variant, default_shared_heads
from .folding import per_head

if TYPE_CHECKING:
    from ..spec import AttentionSpec


class QVKa(Variant):
    """One value head and one rebuilt key per query head; a context of `d_ctx` elements shared by all heads."""

    also_called = "key after value and context"
    stream_parameters: ClassVar[tuple[str, ...]] = ("v_proj", "g_proj")
    two_routes = True
    rotates_rebuilt_keys = True

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        return {"d_ctx": 2 * spec.d_head, "d_key": spec.d_head}

    @classmethod
    def shared_heads(cls, spec: AttentionSpec) -> tuple[int, int]:
        """Rebuilt key heads and value heads."""
        return spec.k_heads or spec.n_heads, spec.v_heads or spec.n_heads

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        k_heads, v_heads = cls.shared_heads(spec)
        if k_heads % v_heads:
            return (
                f"k_heads={k_heads}: every rebuilt key belongs to one value head; use a multiple of v_heads={v_heads}"
            )
        if spec.groups_of(v_heads) and k_heads not in (v_heads, spec.n_heads):
            return (
                f"k_heads={k_heads}: with groups={list(spec.groups or ())} use one rebuilt key per value head "
                f"({v_heads}) or per query head ({spec.n_heads})"
            )
        return None

    @classmethod
    def streams(cls, spec: AttentionSpec) -> tuple[Stream, ...]:
        assert spec.d_ctx
        return (
            Stream(name="v", heads=cls.shared_heads(spec)[1], width=spec.d_head, scores=True, values=True),
            Stream(name="g", heads=1, width=spec.d_ctx, scores=True),
        )

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        assert spec.d_ctx and spec.d_key
        self.k_heads, self.v_heads = self.shared_heads(spec)
        self.v_proj = self.linear(spec.d_model, self.v_heads * spec.d_head)
        self.g_proj = self.linear(spec.d_model, spec.d_ctx)
        self.context_to_key = nn.Parameter(torch.empty(self.k_heads, spec.d_ctx, spec.d_key))
        self.value_to_key = nn.Parameter(torch.empty(self.k_heads, spec.d_head, spec.d_key))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Both factors together map c + d inputs to d_key outputs: Xavier over the joined fan-in."""
        _, fan_in, fan_out = self.context_to_key.shape
        bound = (6 / (fan_in + self.value_to_key.shape[1] + fan_out)) ** 0.5
        for factor in (self.context_to_key, self.value_to_key):
            nn.init.uniform_(factor, -bound, bound)

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        return {"v": self.heads(self.v_proj(x), self.v_heads), "g": self.g_proj(x)[:, None]}

    def _value(self, s: Streams) -> ValueTerm:
        return ValueTerm(stream=s["v"], groups=self.spec.groups_of(self.v_heads))

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        v = per_query_head(s["v"], self.k_heads, self.spec.groups_of(self.v_heads, among=self.k_heads))
        k = rotate(self._keys(v, s["g"][:, 0]), rotation)
        score = ScoreTerm(q=q["q"], stream=k, groups=self.spec.groups_of(self.k_heads))
        return Terms([score], self._value(s))

    def _keys(self, v: Tensor, g: Tensor) -> Tensor:
        """[G; V_h] W_h for all heads: v (B, H, T, D), g (B, T, C) -> (B, H, T, D).

        Tokens of all rows are one long row here, so that W_h is neither repeated nor copied per row of the batch.
        """
        B, H, T, _ = v.shape
        from_context = (g.flatten(0, 1) @ self.context_to_key.transpose(0, 1).flatten(1)).unflatten(1, (H, -1))
        v_rows = v.transpose(1, 2).flatten(0, 1).transpose(0, 1)
        k = torch.baddbmm(from_context.transpose(0, 1), v_rows, self.value_to_key)
        return k.unflatten(1, (B, T)).transpose(0, 1)

    def absorb(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        groups = self.spec.groups_of(self.k_heads)
        to_value, to_context = (per_head(q["q"], w.mT, groups) for w in (self.value_to_key, self.context_to_key))
        value = self._value(s)
        return Terms(
            [
                ScoreTerm(q=to_value, stream=s["v"], groups=value.groups),
                ScoreTerm(q=to_context, stream=s["g"]),
            ],
            value,
        )


class QVKaGQA(QVKa):
    """QV-Ka with value heads shared by groups of query heads.

    One rebuilt key per shared head; `k_heads` may ask for more, up to one per query head.
    """

    also_called = "GQA, key after value and context"

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        shared = spec.v_heads or default_shared_heads(spec)
        return super().defaults(spec) | {"v_heads": shared, "k_heads": shared, "groups": None}
