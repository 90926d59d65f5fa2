"""Random attention requests, small, over everything the decode kernel takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from qvattn.geometry import Geometry
from qvattn.kernels.terms import ScoreTerm, ValueTerm
from qvattn.positions.base import DistanceTables, Rotation
from qvattn.quantised import QuantisedStream, quantise

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@dataclass(frozen=True)
class Request:
    """What `attend` is called with."""

    scores: list[ScoreTerm]
    value: ValueTerm
    geometry: Geometry
    tables: DistanceTables | None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.scores, self.value, self.geometry

    @property
    def exact(self) -> bool:
        """Whether the reference computes what the kernel does: in half precision it rounds rotated and scaled keys."""
        half = any(isinstance(t.stream, Tensor) and t.stream.dtype is not torch.float32 for t in self.scores)
        return not (half and any(t.rotation is not None or t.gain is not None for t in self.scores))


def strided(x: Tensor, spare: int, shift: int) -> Tensor:
    """x (B, G, T, W) as a slice of a larger buffer whose rest is NaN (int8: 99), beginning at an odd address."""
    B, G, T, W = x.shape
    capacity = T + spare
    flat = torch.full((shift + B * G * capacity * W,), 99 if x.dtype is torch.int8 else float("nan"), dtype=x.dtype)
    buffer = flat[shift:].view(B, G, capacity, W)
    buffer[:, :, :T] = x
    return buffer[:, :, :T]


def stream(B: int, G: int, T: int, W: int, dtype: torch.dtype, spare: int = 0, shift: int = 0) -> Any:
    """Normal deviates (B, G, T, W) in `dtype`, int8 quantised."""
    x = torch.randn(B, G, T, W)
    if dtype is not torch.int8:
        return strided(x.to(dtype), spare, shift)
    small = quantise(x)
    return QuantisedStream(strided(small.data, spare, shift), strided(small.scale[..., None], spare, 0)[..., 0])


def geometry_of(draw: Any, B: int, M: int, T: int) -> Geometry:
    """Positions with left padding, sometimes with gaps; queries are the last tokens, sometimes padding."""
    k_pos = torch.full((B, T), -1, dtype=torch.int32)
    q_pos = torch.full((B, M), -1, dtype=torch.int32)
    gaps = draw(st.booleans()) and draw(st.booleans())
    for b in range(B):
        padding = draw(st.sampled_from([0, 0, draw(st.integers(0, T))]))
        steps = torch.randint(1, 4, (T - padding,)) if gaps else torch.ones(T - padding)
        k_pos[b, padding:] = (steps.cumsum(0) - 1).to(torch.int32)
        last = int(k_pos[b].max()) if T else 0
        q_pos[b] = torch.arange(last - M + 1, last + 1, dtype=torch.int32).clamp(min=-1)
    window = draw(st.sampled_from([None, None, 1, 7, 40]))
    wide = torch.int64 if draw(st.booleans()) else torch.int32
    return Geometry(q_pos.to(wide), k_pos.to(wide), causal=draw(st.sampled_from([True, True, False])), window=window)


def tables_of(draw: Any, H: int, geometry: Geometry) -> DistanceTables | None:
    chosen = draw(st.sampled_from(["none", "mul", "add", "all", "agf+pcm-v"]))
    if chosen == "none":
        return None
    low, high = geometry.delta_range
    low, size = low - draw(st.integers(0, 5)), high - low + 12

    def table() -> Tensor:
        return torch.randn(H, size + 3)[:, :size]  # rows that are not contiguous

    if chosen == "agf+pcm-v":
        c = (1 + torch.arange(size).float()) ** -torch.rand(H, 1)
        return DistanceTables(low, mul=c, value_mul=c)
    return DistanceTables(
        low,
        mul=table() if chosen in ("mul", "all") else None,
        add=table() if chosen in ("add", "all") else None,
        value_mul=table() if chosen == "all" else None,
    )


def groups_of(draw: Any, H: int) -> tuple[int, tuple[int, ...] | None]:
    """Shared heads G and their groups: even ones, or any sizes that sum to H."""
    if draw(st.booleans()):
        return draw(st.sampled_from([g for g in range(1, H + 1) if H % g == 0])), None
    sizes: list[int] = []
    while sum(sizes) < H:
        sizes.append(draw(st.integers(1, H - sum(sizes))))
    return len(sizes), tuple(sizes)


@st.composite
def requests(draw: Any, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Request:
    """Any request; T from 0 to about 300, widths that are no multiple of anything, storage at odd addresses."""
    torch.manual_seed(draw(st.integers(0, 2**20)))
    B, H = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    M = draw(st.sampled_from([1, 1, 2, 3, 5, 16]))
    T = draw(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 65, 130, 301]))
    dtype, widths = draw(st.sampled_from(dtypes)), st.sampled_from([2, 6, 16, 20, 34, 64, 72, 128, 136])
    half = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    extra = st.sampled_from([0, 7])
    geometry = geometry_of(draw, B, M, T)
    scores = []
    for _ in range(draw(st.integers(1, 3))):
        G, groups = groups_of(draw, H)
        D, start = draw(widths), draw(st.sampled_from([0, 0, 3]))
        rotation = None
        if draw(st.integers(0, 3)) == 0:
            rotation = Rotation(
                geometry.k_pos,
                dim=draw(st.sampled_from([None, 2])),
                layout=draw(st.sampled_from(["half", "interleaved"])),
                proportional=draw(st.booleans()),
            )
        scores.append(
            ScoreTerm(
                q=torch.randn(B, H, M, D).to(half),
                stream=stream(B, G, T, start + D + draw(extra), dtype, draw(extra), 1),
                start=start,
                groups=groups,
                gain=1 + torch.rand(D) if draw(st.integers(0, 3)) == 0 else None,
                rotation=rotation,
            )
        )
    own = draw(st.booleans())
    G, groups = (scores[0].stream.shape[1], scores[0].groups) if own else groups_of(draw, H)
    summed = scores[0].stream if own else stream(B, G, T, draw(widths) + 4, dtype, 3, 1)
    start = draw(st.sampled_from([0, 1]))
    flat = draw(st.integers(0, 5)) == 0
    value = ValueTerm(
        stream=summed,
        start=start,
        width=draw(st.sampled_from([None, 1, summed.shape[3] - start])),
        groups=None if flat else groups,
        flat=flat,
    )
    return Request(scores, value, geometry, tables_of(draw, H, geometry))
