"""Latent attention: keys and values are made from one low-rank latent per token (DeepSeek-V2, arXiv 2405.04434).

    K_h = latent U^K_h,  V_h = latent U^V_h;   q . K_h = (q U^K_h^T) . latent,   sum a V_h = (sum a latent) U^V_h

Only the latent is cached. `expand` materialises K and V; `absorb` folds the key's factor into the query and the
value's into the output. A decoupled rotary part is a second scoring stream, rotated at write; a key that is itself
rotated stands in the way of folding and is rebuilt and rotated on read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.terms import ScoreTerm, ValueTerm
from ..positions import POSITIONS, Rotation, rotate
from ..streams import Stream
from .base import Streams, Terms, Variant
from .folding import for_all_heads, per_head

if TYPE_CHECKING:
    from ..spec import AttentionSpec

NORM_EPSILON = 1e-6


def default_rank(spec: AttentionSpec) -> int:
    """DeepSeek's four head sizes, but never more than half the model's width."""
    return max(1, min(4 * spec.d_head, spec.d_model // 2))


def xavier_factors(factor: Tensor) -> None:
    """Xavier uniform for (heads, fan_in, fan_out), every head by itself."""
    bound = (6 / (factor.shape[1] + factor.shape[2])) ** 0.5
    nn.init.uniform_(factor, -bound, bound)


class Latent(Variant):
    """What the three share: an optional low-rank query and the norms of latents (`latent_norm`)."""

    two_routes = True
    rotates_rebuilt_keys = True

    @classmethod
    def query_input(cls, spec: AttentionSpec) -> int:
        return spec.q_rank or spec.d_model

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        if spec.q_rank:
            self.q_down = self.linear(spec.d_model, spec.q_rank)
            self.q_norm = self.norm(spec.q_rank)

    def norm(self, rank: int) -> nn.Module:
        """The RMSNorm of a latent, with a gain; the identity where the spec says latent_norm=False."""
        return nn.RMSNorm(rank, eps=NORM_EPSILON) if self.spec.latent_norm else nn.Identity()

    def query_heads(self, x: Tensor) -> Tensor:
        """x (B, M, E) -> queries (B, H, M, D), not rotated."""
        if self.spec.q_rank:
            x = self.q_norm(self.q_down(x))
        return self.heads(self.q_proj(x), self.n_heads)

    def queries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        return {"q": rotate(self.query_heads(x), rotation)}


class MLA(Latent):
    """Keys and values from one latent, beside a single-head rotary key shared by all query heads."""

    also_called = "multi-head latent attention"
    stream_parameters: ClassVar[tuple[str, ...]] = ("kv_down", "kv_norm", "k_rope_proj")

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        rotary = POSITIONS[spec.position.kind].rotary
        return {
            "kv_rank": default_rank(spec),
            "q_rank": None,
            "rope_dim": max(2, spec.d_head // 4 * 2) if rotary else 0,
            "d_key": spec.d_head,
            "d_value": spec.d_head,
            "latent_norm": True,
        }

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        if spec.rope_dim and not POSITIONS[spec.position.kind].rotary:
            return (
                f"rope_dim={spec.rope_dim}: position {spec.position.kind!r} rotates nothing; "
                "leave rope_dim unset or use position='rope'"
            )
        return None

    @classmethod
    def absorbs(cls, spec: AttentionSpec) -> bool:
        return bool(spec.rope_dim) or super().absorbs(spec)

    @classmethod
    def query_width(cls, spec: AttentionSpec) -> int:
        return (spec.d_key or spec.d_head) + (spec.rope_dim or 0)

    @classmethod
    def streams(cls, spec: AttentionSpec) -> tuple[Stream, ...]:
        assert spec.kv_rank
        latent = Stream(name="latent", heads=1, width=spec.kv_rank, scores=True, values=True)
        if not spec.rope_dim:
            return (latent,)
        return latent, Stream(name="k_rope", heads=1, width=spec.rope_dim, scores=True)

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        assert spec.kv_rank and spec.d_key and spec.d_value
        self.kv_down = self.linear(spec.d_model, spec.kv_rank)
        self.kv_norm = self.norm(spec.kv_rank)
        self.k_rope_proj = self.linear(spec.d_model, spec.rope_dim) if spec.rope_dim else None
        self.latent_to_key = nn.Parameter(torch.empty(spec.n_heads, spec.kv_rank, spec.d_key))
        self.latent_to_value = nn.Parameter(torch.empty(spec.n_heads, spec.kv_rank, spec.d_value))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for factor in (self.latent_to_key, self.latent_to_value):
            xavier_factors(factor)

    def queries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        if not self.spec.rope_dim:
            return super().queries(x, rotation)
        q, q_rope = self.query_heads(x).split([self.latent_to_key.shape[2], self.spec.rope_dim], dim=-1)
        return {"q": q, "q_rope": rotate(q_rope, rotation)}

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        entries = {"latent": self.kv_norm(self.kv_down(x))[:, None]}
        if self.k_rope_proj is not None:
            entries["k_rope"] = rotate(self.k_rope_proj(x)[:, None], rotation)
        return entries

    def _rotary(self, q: Mapping[str, Tensor], s: Streams) -> list[ScoreTerm]:
        return [ScoreTerm(q=q["q_rope"], stream=s["k_rope"])] if self.spec.rope_dim else []

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        k = for_all_heads(s["latent"], self.latent_to_key)
        score = ScoreTerm(q=q["q"], stream=k if self.spec.rope_dim else rotate(k, rotation))
        return Terms([score, *self._rotary(q, s)], ValueTerm(stream=for_all_heads(s["latent"], self.latent_to_value)))

    def absorb(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        score = ScoreTerm(q=per_head(q["q"], self.latent_to_key.mT), stream=s["latent"])
        return Terms([score, *self._rotary(q, s)], ValueTerm(stream=s["latent"], lift=self.latent_to_value))


class QVMLA(Latent):
    """MLA without keys: one up-projection serves the score and the value."""

    also_called = "MLA without keys, MLA-QvVv"
    stream_parameters: ClassVar[tuple[str, ...]] = ("kv_down", "kv_norm")

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        return {"kv_rank": default_rank(spec), "q_rank": None, "latent_norm": True}

    @classmethod
    def streams(cls, spec: AttentionSpec) -> tuple[Stream, ...]:
        assert spec.kv_rank
        return (Stream(name="latent", heads=1, width=spec.kv_rank, scores=True, values=True),)

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        assert spec.kv_rank
        self.kv_down = self.linear(spec.d_model, spec.kv_rank)
        self.kv_norm = self.norm(spec.kv_rank)
        self.latent_to_value = nn.Parameter(torch.empty(spec.n_heads, spec.kv_rank, spec.d_head))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        xavier_factors(self.latent_to_value)

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        return {"latent": self.kv_norm(self.kv_down(x))[:, None]}

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        v = for_all_heads(s["latent"], self.latent_to_value)
        return Terms([ScoreTerm(q=q["q"], stream=v, rotation=rotation)], ValueTerm(stream=v))

    def absorb(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        score = ScoreTerm(q=per_head(q["q"], self.latent_to_value.mT), stream=s["latent"])
        return Terms([score], ValueTerm(stream=s["latent"], lift=self.latent_to_value))


class MLAWideK(Latent):
    """MLA whose keys have a latent of their own, compressed no more than the queries (rank `q_rank` both)."""

    also_called = "MLA with K compressed as little as Q"
    stream_parameters: ClassVar[tuple[str, ...]] = ("v_down", "v_norm", "k_down", "k_norm")

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        rank = spec.kv_rank or default_rank(spec)
        return {
            "kv_rank": rank,
            "q_rank": max(rank, spec.d_model // 2),
            "d_key": spec.d_head,
            "d_value": spec.d_head,
            "latent_norm": True,
        }

    @classmethod
    def streams(cls, spec: AttentionSpec) -> tuple[Stream, ...]:
        assert spec.kv_rank and spec.q_rank
        return (
            Stream(name="latent_v", heads=1, width=spec.kv_rank, values=True),
            Stream(name="latent_k", heads=1, width=spec.q_rank, scores=True),
        )

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        assert spec.kv_rank and spec.q_rank and spec.d_key and spec.d_value
        self.v_down, self.k_down = self.linear(spec.d_model, spec.kv_rank), self.linear(spec.d_model, spec.q_rank)
        self.v_norm, self.k_norm = self.norm(spec.kv_rank), self.norm(spec.q_rank)
        self.latent_to_key = nn.Parameter(torch.empty(spec.n_heads, spec.q_rank, spec.d_key))
        self.latent_to_value = nn.Parameter(torch.empty(spec.n_heads, spec.kv_rank, spec.d_value))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for factor in (self.latent_to_key, self.latent_to_value):
            xavier_factors(factor)

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        return {
            "latent_v": self.v_norm(self.v_down(x))[:, None],
            "latent_k": self.k_norm(self.k_down(x))[:, None],
        }

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        k = rotate(for_all_heads(s["latent_k"], self.latent_to_key), rotation)
        return Terms(
            [ScoreTerm(q=q["q"], stream=k)], ValueTerm(stream=for_all_heads(s["latent_v"], self.latent_to_value))
        )

    def absorb(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        score = ScoreTerm(q=per_head(q["q"], self.latent_to_key.mT), stream=s["latent_k"])
        return Terms([score], ValueTerm(stream=s["latent_v"], lift=self.latent_to_value))
