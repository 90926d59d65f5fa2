"""What a variant is: parameters, `queries`, `entries` for the streams, terms for the kernel, and `output`.

A variant never computes a softmax, never touches a cache, and never asks for a length: it maps tokens to queries and
stream entries, and says which view of which stream each query meets (DESIGN 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ..kernels.terms import ScoreTerm, ValueTerm
from ..positions import POSITIONS, Rotation
from ..streams import Stream

if TYPE_CHECKING:
    from ..spec import AttentionSpec

Streams = Mapping[str, Tensor]
"""Stream name -> (B, G, T, W)."""


class Terms(NamedTuple):
    """What the kernel is asked for: scoring terms whose products are summed, and the value term."""

    scores: list[ScoreTerm]
    value: ValueTerm


def default_shared_heads(spec: AttentionSpec) -> int:
    """Shared heads where the spec leaves them open: as `groups` name, or the largest divisor of H up to H / 4."""
    if spec.groups:
        return len(spec.groups)
    return next(g for g in range(max(1, spec.n_heads // 4), 0, -1) if spec.n_heads % g == 0)


class Variant(nn.Module):
    """Base of all variants. A subclass states its fields, its streams and its maths; nothing else knows it.

    Modules and parameters used by `entries` are listed in `stream_parameters`: a layer that reuses the streams of an
    earlier layer drops them.
    """

    also_called: ClassVar[str] = ""
    stream_parameters: ClassVar[tuple[str, ...]] = ("v_proj",)
    two_routes: ClassVar[bool] = False
    """Whether `absorb` differs from `expand`."""
    rotates_rebuilt_keys: ClassVar[bool] = False
    """Whether RoPE would turn a key that `absorb` folds away, so that only `expand` serves it."""

    @classmethod
    def absorbs(cls, spec: AttentionSpec) -> bool:
        """Whether `absorb` differs from `expand` and gives the same numbers under this spec."""
        return cls.two_routes and not (POSITIONS[spec.position.kind].rotary and cls.rotates_rebuilt_keys)

    @classmethod
    def defaults(cls, spec: AttentionSpec) -> dict[str, Any]:
        """The optional fields this variant uses, with the values they take when unset."""
        return {}

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        """A reason to refuse the (resolved) spec, naming field, value and fix; or None."""
        return None

    @classmethod
    def streams(cls, spec: AttentionSpec) -> tuple[Stream, ...]:
        """What is cached per token."""
        raise TypeError(f"{cls.__name__} must state its streams")

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.n_heads, self.spec = spec.n_heads, spec
        self.q_proj = self.linear(self.query_input(spec), spec.n_heads * self.query_width(spec))
        out_bias = spec.bias if spec.out_bias is None else spec.out_bias
        self.o_proj = nn.Linear(spec.n_heads * self.output_width(spec), spec.d_model, bias=out_bias)
        self.q_head_norm = self.head_norm(self.query_width(spec))

    def head_norm(self, width: int) -> nn.Module:
        """RMSNorm over a head of queries or keys, where `qk_norm` asks for it."""
        epsilon = self.spec.qk_norm
        return nn.Identity() if epsilon is None else nn.RMSNorm(width, eps=epsilon)

    def linear(self, wide: int, narrow: int) -> nn.Linear:
        return nn.Linear(wide, narrow, bias=self.spec.bias)

    @classmethod
    def query_input(cls, spec: AttentionSpec) -> int:
        """Width of what the query projection reads."""
        return spec.d_model

    @classmethod
    def query_width(cls, spec: AttentionSpec) -> int:
        """Width D of a query head."""
        return spec.d_key or spec.d_head

    @classmethod
    def output_width(cls, spec: AttentionSpec) -> int:
        """Width of what each query head brings to the output projection."""
        return spec.d_value or spec.d_head

    @property
    def scale(self) -> float:
        """Multiplies the summed products of queries and streams: 1 / sqrt(width of the key before any folding)."""
        return 1 / math.sqrt(self.query_width(self.spec))

    def heads(self, x: Tensor, count: int) -> Tensor:
        """(B, T, count * D) -> (B, count, T, D)."""
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    def queries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        """x (B, M, E) -> queries by name, each (B, H, M, D), turned by `rotation` where the variant rotates."""
        q = self.q_head_norm(self.heads(self.q_proj(x), self.n_heads))
        return {"q": q if rotation is None else rotation(q)}

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        """x (B, T, E) -> new stream entries (B, G, T, W), rotated where the variant rotates at write."""
        raise TypeError(f"{type(self).__name__} must make its stream entries")

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        """Terms over materialised keys and values. `rotation`: at the key positions, for rotation on read."""
        raise TypeError(f"{type(self).__name__} must state its terms")

    def absorb(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        """Terms over the streams as they are cached, all factors folded into queries and output."""
        return self.expand(q, s, rotation)

    def output(self, o: Tensor) -> Tensor:
        """(B, H, M, D) -> (B, M, E)."""
        y: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return y
