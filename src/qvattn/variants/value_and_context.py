"""QV-Ka: the key is made from the value and a small context (arXiv 2603.15665).

    K_h = [G; V_h] W_h,  W_h = [W_G; W_V];   q . K_h = (q W_G^T) . G + (q W_V^T) . V_h

Only V and G are cached. `expand` materialises K_h; `absorb` folds W_h into the query, which is exact while nothing
stands between W_h and the dot product: RoPE would, so with it keys are rebuilt and rotated on read.

`key_from` says which values a key is made from beside G: those of its own head ("own", the paper's), of all heads
("all": K_h = [G; V_1 .. V_Hv] W_h, which costs no cache and helps a converted model most), or none ("context": K_h =
G W_h, a low-rank key of all heads together).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.terms import ScoreTerm, ValueTerm, per_query_head
from ..positions import POSITIONS, Rotation
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
        return {
            "d_ctx": 2 * spec.d_head,
            "d_key": spec.d_head,
            "key_from": "own",
            "key_bias": False,
            "qk_norm": None,
        }

    @classmethod
    def absorbs(cls, spec: AttentionSpec) -> bool:
        """Neither through a rotation of the rebuilt key nor through a norm of it."""
        return super().absorbs(spec) and spec.qk_norm is None

    @classmethod
    def shared_heads(cls, spec: AttentionSpec) -> tuple[int, int]:
        """Rebuilt key heads and value heads."""
        return spec.k_heads or spec.n_heads, spec.v_heads or spec.n_heads

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        k_heads, v_heads = cls.shared_heads(spec)
        if spec.key_bias and not POSITIONS[spec.position.kind].rotary:
            return (
                f"key_bias=True: position {spec.position.kind!r} does not rotate keys, so a constant key shifts all "
                "scores of a query alike and softmax ignores it; leave key_bias unset or use position='rope'"
            )
        if k_heads % v_heads and spec.key_from == "own":
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
        scores = spec.key_from != "context"
        return (
            Stream(name="v", heads=cls.shared_heads(spec)[1], width=spec.d_head, scores=scores, values=True),
            Stream(name="g", heads=1, width=spec.d_ctx, scores=True),
        )

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        assert spec.d_ctx and spec.d_key
        self.k_heads, self.v_heads = self.shared_heads(spec)
        self.v_proj = self.linear(spec.d_model, self.v_heads * spec.d_head)
        self.g_proj = self.linear(spec.d_model, spec.d_ctx)
        self.context_to_key = nn.Parameter(torch.empty(self.k_heads, spec.d_ctx, spec.d_key))
        read = {"own": spec.d_head, "all": self.v_heads * spec.d_head, "context": 0}[spec.key_from or "own"]
        self.value_to_key = nn.Parameter(torch.empty(self.k_heads, read, spec.d_key)) if read else None
        self.key_bias = nn.Parameter(torch.empty(self.k_heads, spec.d_key)) if spec.key_bias else None
        self.k_head_norm = self.head_norm(spec.d_key)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All factors together map c + d inputs to d_key outputs: Xavier over the joined fan-in; no bias at first."""
        factors = [f for f in (self.context_to_key, self.value_to_key) if f is not None]
        fan_in, fan_out = sum(f.shape[1] for f in factors), self.context_to_key.shape[2]
        bound = (6 / (fan_in + fan_out)) ** 0.5
        for factor in factors:
            nn.init.uniform_(factor, -bound, bound)
        if self.key_bias is not None:
            nn.init.zeros_(self.key_bias)

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        return {"v": self.heads(self.v_proj(x), self.v_heads), "g": self.g_proj(x)[:, None]}

    def _value(self, s: Streams) -> ValueTerm:
        return ValueTerm(stream=s["v"], groups=self.spec.groups_of(self.v_heads))

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        k, groups = self.keys(s["v"], s["g"][:, 0]), self.spec.groups_of(self.k_heads)
        return Terms([ScoreTerm(q=q["q"], stream=k, groups=groups, rotation=rotation)], self._value(s))

    def keys(self, v: Tensor, g: Tensor) -> Tensor:
        """The rebuilt keys before any rotation: v (B, G, T, D), g (B, T, C) -> (B, k_heads, T, d_key).

        Tokens of all rows are one long row here, so that W_h is neither repeated nor copied per row of the batch.
        """
        B, T, _ = g.shape
        made = self._shared_part(v, g).unflatten(-1, (self.k_heads, -1)).transpose(0, 1)
        if self.spec.key_from == "own":
            assert self.value_to_key is not None
            own = per_query_head(v, self.k_heads, self.spec.groups_of(self.v_heads, among=self.k_heads))
            made = torch.baddbmm(made, own.transpose(1, 2).flatten(0, 1).transpose(0, 1), self.value_to_key)
        if self.key_bias is not None:
            made = made + self.key_bias[:, None]
        k: Tensor = self.k_head_norm(made.unflatten(1, (B, T)).transpose(0, 1))
        return k

    def _shared_part(self, v: Tensor, g: Tensor) -> Tensor:
        """What every head's key takes from what all heads share, (B * T, k_heads * d_key)."""
        read = g
        factor: Tensor = self.context_to_key
        if self.spec.key_from == "all":
            assert self.value_to_key is not None
            read = torch.cat((g, *v.unbind(1)), dim=-1)
            factor = torch.cat((factor, self.value_to_key), dim=1)
        return read.flatten(0, 1) @ factor.transpose(0, 1).flatten(1)

    def absorb(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        groups, value = self.spec.groups_of(self.k_heads), self._value(s)
        scores = [ScoreTerm(q=per_head(q["q"], self.context_to_key.mT, groups), stream=s["g"])]
        if self.value_to_key is not None:
            to_value = per_head(q["q"], self.value_to_key.mT, groups)
            if self.spec.key_from == "own":
                scores.append(ScoreTerm(q=to_value, stream=s["v"], groups=value.groups))
            else:
                parts = to_value.unflatten(-1, (self.v_heads, -1)).unbind(-2)
                scores += [ScoreTerm(q=part, stream=s["v"][:, i : i + 1]) for i, part in enumerate(parts)]
        return Terms(scores, value)


class QVKaGQA(QVKa):
    """QV-Ka with value heads shared by groups of query heads.

    One rebuilt key per shared head; `k_heads` may ask for more, up to one per query head.
    """

    also_called = "GQA, key after value and context"

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        shared = spec.v_heads or default_shared_heads(spec)
        return super().defaults(spec) | {"v_heads": shared, "k_heads": shared, "groups": None}
