"""What every position scheme is: three tables over distance, or a rotation, or an embedding added at the bottom.

    s_h(m,n) = mul_h(delta) * (q.k * scale) + add_h(delta);  a = softmax(s);  o = sum_n a(m,n) value_mul_h(delta) v(n)

with delta = m - n (DESIGN 2.2). A scheme never sees tensors of tokens: only distances and positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class DistanceTables:
    """Tables (H, N) over the distances delta_min .. delta_min + N - 1; None means "no such factor"."""

    delta_min: int
    mul: Tensor | None = None
    add: Tensor | None = None
    value_mul: Tensor | None = None

    def narrow(self, low: int, high: int) -> DistanceTables:
        """The same tables over low .. high only."""
        cut = slice(low - self.delta_min, high - self.delta_min + 1)
        parts = (None if t is None else t[:, cut] for t in (self.mul, self.add, self.value_mul))
        return DistanceTables(low, *parts)


class Rotation:
    """Rotary embedding at given positions (RoFormer, arXiv 2104.09864, eq. 15): a map (B, H, T, W) -> same.

    positions: (B, T) or (1, T).  dim: how many elements are rotated, None for all.
    layout: "half" pairs element i with i + dim/2 (Llama); "interleaved" pairs 2i with 2i + 1 (GPT-J, DeepSeek).
    proportional: pairs and frequencies are laid out over the whole width and only the first dim/2 pairs turn
        (Gemma 4); otherwise the leading `dim` elements are laid out among themselves (GPT-NeoX).
    frequencies: radians per token of each pair, instead of those that follow from `base` (scaled RoPE).
    gain: multiplies what is turned (YaRN, arXiv 2309.00071).
    """

    def __init__(
        self,
        positions: Tensor,
        *,
        base: float = 10_000.0,
        dim: int | None = None,
        layout: Literal["half", "interleaved"] = "half",
        proportional: bool = False,
        frequencies: Sequence[float] | None = None,
        gain: float = 1.0,
    ) -> None:
        self.positions, self.base, self.dim, self.layout = positions, base, dim, layout
        self.proportional, self.frequencies, self.gain = proportional, frequencies, gain
        self._tables: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """cos and sin, each (B, T, pairs), for streams of `width` elements; `span(width)` elements in pairs."""
        span = self.span(width)
        if (span, dtype) not in self._tables:
            wide = wide_dtype(dtype)
            angle = self.positions[..., None].to(wide) * self._frequency(span, wide)
            cos, sin = angle.cos(), angle.sin()
            if self.gain != 1:
                cos, sin = cos * self.gain, sin * self.gain
            self._tables[span, dtype] = (cos.to(dtype), sin.to(dtype))
        return self._tables[span, dtype]

    def _frequency(self, span: int, wide: torch.dtype) -> Tensor:
        """Radians per token of each pair, (span / 2,); rounded as transformers rounds them."""
        device = self.positions.device
        if self.frequencies is not None:
            return torch.tensor(self.frequencies, dtype=wide, device=device)
        steps = torch.arange(0, span, 2, dtype=wide, device=device)
        frequency: Tensor = 1.0 / self.base ** (steps / span)
        return frequency if self.dim is None else frequency * (steps < self.dim)

    @property
    def options(self) -> tuple[Any, ...]:
        """Everything but the positions."""
        return (self.base, self.dim, self.layout, self.proportional, self.frequencies, self.gain)

    def at(self, positions: Tensor) -> Rotation:
        """The same rotation at other positions."""
        base, dim, layout, proportional, frequencies, gain = self.options
        return Rotation(
            positions,
            base=base,
            dim=dim,
            layout=layout,
            proportional=proportional,
            frequencies=frequencies,
            gain=gain,
        )

    def span(self, width: int) -> int:
        """How many leading elements of `width` are laid out in pairs."""
        return width if self.proportional else self.dim or width

    def __call__(self, x: Tensor) -> Tensor:
        dim = self.span(x.shape[-1])
        wide = wide_dtype(x.dtype)
        cos, sin = (table[:, None] for table in self.tables(x.shape[-1], wide))
        part = x[..., :dim].to(wide)
        if self.layout == "half":
            a, b = part.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = part[..., 0::2], part[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        turned = turned.to(x.dtype)
        return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), dim=-1)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype distances are worked with: float32, or float64 where the parameters are."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """x rotated, or x itself where the scheme does not rotate."""
    return x if rotation is None else rotation(x)


class Position(nn.Module):
    """Base of all schemes. A scheme states its options with defaults and overrides what it has.

    n_heads: query heads H.  causal: whether only non-negative distances occur.  options: resolved, complete.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    """Option name -> default value; every other option of PositionSpec must be left unset."""
    absolute: ClassVar[bool] = False
    """Whether the model adds an embedding of the position to its input (`embedding`)."""
    rotary: ClassVar[bool] = False
    """Whether queries and scoring streams are rotated."""

    def __init__(self, n_heads: int, causal: bool, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.n_heads, self.causal, self.options_in_use = n_heads, causal, dict(options)
        self._memo: tuple[Any, DistanceTables] | None = None

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> str | None:
        """A reason to refuse these options, or None."""
        return None

    @classmethod
    def embedding(cls, d_model: int, options: Mapping[str, Any]) -> nn.Module | None:
        """The module that maps positions (B, T) to (B, T, E), for absolute schemes."""
        return None

    def rotation(self, positions: Tensor) -> Rotation | None:
        """The rotation at these positions, for rotary schemes."""
        return None

    def compute(self, delta: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """mul, add, value_mul at integer distances `delta` (N,), each (H, N) or None."""
        return None, None, None

    def train(self, mode: bool = True) -> Self:
        """As any module; what was remembered of the parameters is forgotten, since training changes them."""
        self._memo = None
        return super().train(mode)

    @property
    def has_tables(self) -> bool:
        return type(self).compute is not Position.compute

    def tables(self, low: int, high: int, device: torch.device | str | None = None) -> DistanceTables | None:
        """Tables over low .. high. Without gradients the widest tables so far are kept, for decoding.

        device: where they are wanted; default: where the scheme's parameters are.
        """
        if not self.has_tables:
            return None
        parameters = [*self.parameters(), *self.buffers()]
        if device is None:
            device = parameters[0].device if parameters else "cpu"
        if torch.is_grad_enabled():
            return DistanceTables(low, *self.compute(torch.arange(low, high + 1, device=device)))
        key = (device, *((p.data_ptr(), p._version, p.dtype) for p in parameters if not p.is_inference()))
        if self._memo is not None and self._memo[0] == key:
            known = self._memo[1]
            some = next(t for t in (known.mul, known.add, known.value_mul) if t is not None)
            if known.delta_min <= low and high < known.delta_min + some.shape[1]:
                return known.narrow(low, high)
        wide_low, wide_high = min(low, -low if not self.causal else 0), max(64, 2 * high)
        with torch.no_grad():
            delta = torch.arange(wide_low, wide_high + 1, device=device)
            known = DistanceTables(wide_low, *self.compute(delta))
        self._memo = (key, known)
        return known.narrow(low, high)
