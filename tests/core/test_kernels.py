"""Kernels by themselves: the reference against loops over numbers, the others against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention

from qvattn import Geometry, ScoreTerm, UserError, ValueTerm, attend
from qvattn.kernels import attend_with_weights, choose
from qvattn.positions import DistanceTables, Rotation

from .loops import attend_in_loops
from .tiny import close, left_padded

GROUPS = [(4, None), (1, None), (2, None), (2, (3, 1)), (3, (1, 2, 1))]
"""Shared heads for four query heads, and how they are divided."""


@dataclass(repr=False)
class Request:
    scores: list[ScoreTerm]
    value: ValueTerm
    geometry: Geometry
    scale: float
    tables: DistanceTables | None

    def __call__(self, impl: str) -> Tensor:
        return self.real(
            attend(self.scores, self.value, self.geometry, scale=self.scale, tables=self.tables, impl=impl)
        )

    def __repr__(self) -> str:
        g, t = self.geometry, self.tables
        scores = [
            (
                tuple(s.q.shape),
                tuple(s.stream.shape),
                s.start,
                s.groups,
                s.gain is not None,
                s.rotation and vars(s.rotation),
            )
            for s in self.scores
        ]
        v = self.value
        value = (tuple(v.stream.shape), v.start, v.width, v.groups, v.flat, v.lift is not None)
        tables = t and [name for name in ("mul", "add", "value_mul") if getattr(t, name) is not None]
        where = (g.q_pos.tolist(), g.k_pos.tolist(), f"causal={g.causal}", f"window={g.window}")
        return f"Request(scores={scores}, value={value}, geometry={where}, tables={tables})"

    def real(self, o: Tensor) -> Tensor:
        """Outputs (B, H, M, D) of real queries; what a padding query gets without causality is nobody's business."""
        padding = (self.geometry.q_pos < 0)[:, None, :, None]
        return o if self.geometry.causal else o.masked_fill(padding, 0.0)

    def in_loops(self) -> Tensor:
        return self.real(attend_in_loops(self.scores, self.value, self.geometry, scale=self.scale, tables=self.tables))


@st.composite
def requests(draw: st.DrawFn, tables: tuple[str, ...] = ("mul", "add", "value_mul")) -> Request:
    """Any request a variant could make: several terms, views, sharing, gains, rotations, lifts, windows, padding."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    B, H, M = draw(st.integers(1, 2)), 4, draw(st.integers(1, 4))
    T = M + draw(st.integers(0, 5))
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, T))
    k_pos = (
        left_padded([draw(st.integers(0, T)) for _ in range(B)], T) if draw(st.booleans()) else torch.arange(T)[None]
    )
    geometry = Geometry(k_pos[:, T - M :], k_pos, causal=causal, window=window)
    scores = []
    for _ in range(draw(st.integers(1, 3))):
        shared, groups = draw(st.sampled_from(GROUPS))
        width, start, spare = draw(st.sampled_from([2, 4, 6])), draw(st.integers(0, 2)), draw(st.integers(0, 2))
        rotation = None
        if draw(st.booleans()):
            dim = draw(st.sampled_from([None, 2]))
            layout: Any = draw(st.sampled_from(["half", "interleaved"]))
            rotation = Rotation(k_pos, base=100.0, dim=dim, layout=layout, proportional=draw(st.booleans()))
        scores.append(
            ScoreTerm(
                q=randn(B, H, M, width),
                stream=randn(B, shared, T, start + width + spare),
                start=start,
                groups=groups,
                gain=randn(width) if draw(st.booleans()) else None,
                rotation=rotation,
            )
        )
    shared, groups = draw(st.sampled_from(GROUPS))
    start, width, flat = draw(st.integers(0, 2)), draw(st.sampled_from([None, 3])), draw(st.booleans())
    stream = randn(B, shared, T, 6)
    summed = (6 - start if width is None else width) * (shared if flat else 1)
    lift = randn(H, summed, 3) if draw(st.booleans()) else None
    value = ValueTerm(stream=stream, start=start, width=width, groups=groups, flat=flat, lift=lift)
    low, high = geometry.delta_range
    present = {name: randn(H, high - low + 1) for name in tables if draw(st.booleans())}
    return Request(scores, value, geometry, 0.4, DistanceTables(low, **present) if present else None)


@settings(max_examples=120, deadline=None)
@given(requests())
def test_reference_is_what_the_loops_say(request: Request) -> None:
    expected = request.in_loops()
    close(request("reference").double(), expected)
    o, a = attend_with_weights(
        request.scores, request.value, request.geometry, scale=request.scale, tables=request.tables
    )
    close(request.real(o).double(), expected)
    total = a.sum(-1)
    close(total, (total > 0.5).float())


@settings(max_examples=60, deadline=None)
@given(requests(tables=("add",)))
def test_sdpa_equals_reference(request: Request) -> None:
    close(request("sdpa"), request("reference"))


@settings(max_examples=25, deadline=None)
@given(requests(tables=("mul", "add")))
def test_flex_equals_reference(request: Request) -> None:
    with torch.no_grad():
        close(request("flex"), request("reference"))


@settings(max_examples=60, deadline=None)
@given(requests())
def test_auto_equals_reference(request: Request) -> None:
    with torch.no_grad():
        close(request("auto"), request("reference"))


def plain(M: int = 3, T: int = 3, **tables: Tensor) -> Request:
    k_pos = torch.arange(T)[None]
    q, k, v = torch.randn(1, 2, M, 4), torch.randn(1, 2, T, 4), torch.randn(1, 2, T, 4)
    return Request(
        [ScoreTerm(q=q, stream=k)],
        ValueTerm(stream=v),
        Geometry(k_pos[:, T - M :], k_pos, causal=True),
        0.5,
        DistanceTables(1 - T, **tables) if tables else None,
    )


def test_flex_as_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through PyTorch's own tracing, which the other tests leave out for speed."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False, raising=False)
    request = plain(mul=torch.rand(2, 5))
    with torch.no_grad():
        close(request("flex"), request("reference"))


@pytest.mark.parametrize(
    ("impl", "table", "reason"),
    [
        ("sdpa", "mul", "scores are multiplied"),
        ("sdpa", "value_mul", "values are multiplied"),
        ("flex", "value_mul", "values are multiplied"),
    ],
)
def test_explicit_kernel_never_falls_back(impl: str, table: str, reason: str) -> None:
    request = plain(**{table: torch.rand(2, 5)})
    with pytest.raises(UserError, match=rf"impl='{impl}'.*{reason}.*use impl="):
        request(impl)


def test_kernels_refuse_what_they_cannot_do() -> None:
    request = plain()
    for impl in ("sdpa", "flex"):
        with pytest.raises(UserError, match=f"impl='{impl}'.*dropout"):
            attend(request.scores, request.value, request.geometry, scale=1.0, dropout=0.1, impl=impl)
    request.value.stream.requires_grad_()
    with pytest.raises(UserError, match=r"impl='flex'.*no backward"):
        request("flex")
    with pytest.raises(UserError, match="impl='fast': allowed are auto, reference"):
        request("fast")
    assert choose("auto", request.scores, request.value).why


def test_tables_must_cover_the_distances() -> None:
    for tables, message in (
        (DistanceTables(0, mul=torch.rand(2, 3)), r"tables\.mul covers distances 0 to 2; this geometry needs -2 to 2"),
        (DistanceTables(-2, add=torch.rand(1, 5)), r"tables\.add has shape \(1, 5\), expected \[H=2, N\]"),
    ):
        with pytest.raises(UserError, match=message):
            replace(plain(), tables=tables)("reference")


def test_dropout_is_of_weights_and_keeps_the_mean() -> None:
    request = plain(1, 400)
    draws = [attend(request.scores, request.value, request.geometry, scale=0.5, dropout=0.3) for _ in range(200)]
    mean = torch.stack(draws).mean(0)
    assert (mean - request("reference")).abs().max() < 0.03
    assert not torch.equal(draws[0], draws[1])


def test_requests_that_do_not_fit_say_what_does() -> None:
    r = plain()
    q, k, v = r.scores[0].q, r.scores[0].stream, r.value.stream
    assert isinstance(v, torch.Tensor)
    turn = Rotation(r.geometry.k_pos, base=1e4, dim=6, layout="half")
    bad: list[tuple[list[ScoreTerm], ValueTerm, Geometry, str]] = [
        ([], r.value, r.geometry, r"scores=\(\)"),
        ([ScoreTerm(q=q, stream=k, start=1)], r.value, r.geometry, r"scores\[0\]: view 1\.\.5 leaves.*width 4"),
        ([ScoreTerm(q=q, stream=k[:, :, :2])], r.value, r.geometry, r"scores\[0\]\.stream has shape .*T=3"),
        ([*r.scores, ScoreTerm(q=q[:, :1], stream=k)], r.value, r.geometry, r"scores\[1\]\.q has shape .*H=2"),
        ([ScoreTerm(q=q, stream=k, groups=(2,))], r.value, r.geometry, r"scores\[0\]\.groups=\(2,\).*sum to H=2"),
        (r.scores, replace(r.value, groups=(1, 2)), r.geometry, r"value\.groups=\(1, 2\).*sum to H=2"),
        (r.scores, ValueTerm(stream=torch.randn(1, 3, 3, 4)), r.geometry, r"value has G=3 .*give `groups`"),
        (r.scores, ValueTerm(stream=v[:, :0], flat=True), r.geometry, r"value\.stream has shape .*G of 1 or more"),
        ([ScoreTerm(q=q, stream=k[:, :0])], r.value, r.geometry, r"scores\[0\] has G=0 .*give `groups`"),
        ([ScoreTerm(q=q, stream=k, rotation=turn)], r.value, r.geometry, r"rotation turns 6 elements.*D=4"),
        (r.scores, r.value, Geometry.contiguous(4, causal=True), r"geometry is for M=4, T=4.*M=3, T=3"),
    ]
    for scores, value, geometry, message in bad:
        with pytest.raises(UserError, match=message):
            attend(scores, value, geometry, scale=1.0)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_beyond_all_distances_hides_nothing(causal: bool) -> None:
    request, positions = plain(), torch.arange(3, dtype=torch.int32)[None]
    wide = replace(request, geometry=Geometry(positions, positions, causal=causal, window=2**31))
    none = replace(request, geometry=Geometry(positions, positions, causal=causal))
    assert torch.equal(wide("reference"), none("reference"))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_geometry_agrees_with_its_definition(data: st.DataObject) -> None:
    """Visibility, seeing queries, Toeplitz offset, range of distances and spread, for any positions."""
    B, M, T = (data.draw(st.integers(1, 3)) for _ in range(3))
    position = st.integers(-1, 6)
    k_pos = torch.tensor([[data.draw(position) for _ in range(T)] for _ in range(B)])
    q_pos = torch.tensor([[data.draw(position) for _ in range(M)] for _ in range(B)])
    causal, window = data.draw(st.booleans()), data.draw(st.none() | st.integers(1, 4))
    g = Geometry(q_pos, k_pos, causal=causal, window=window)
    low, high = g.delta_range
    table = torch.arange(low, high + 1).float()[None]
    spread = g.spread(table, low)
    for b in range(B):
        for m in range(M):
            for n in range(T):
                q, k = int(q_pos[b, m]), int(k_pos[b, n])
                near = window is None or (q - k < window and (causal or k - q < window))
                expected = k >= 0 and (not causal or k <= q) and near
                visible = True if g.visible is None else bool(g.visible.expand(B, 1, M, T)[b, 0, m, n])
                assert visible == expected
                if expected and q >= 0:
                    assert float(spread.expand(B, 1, M, T)[b, 0, m, n]) == q - k
