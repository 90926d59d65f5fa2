"""Position schemes by themselves: their formulas, their starts, and what training cannot break (CASES 2, 15)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qvattn import PositionSpec, UserError
from qvattn.positions import POSITIONS, Position, Rotation
from qvattn.positions.bias import alibi_slopes

from .tiny import close, scramble


def scheme(kind: str, heads: int = 4, causal: bool = True, **options: Any) -> Position:
    spec = PositionSpec(kind=kind, **options)
    return POSITIONS[kind](heads, causal, spec.options)


def test_agf_starts_spread_from_flat_to_steep() -> None:
    agf = scheme("agf", heads=5)
    p = agf.exponents[0]
    close(p[0], torch.tensor(0.05))
    close(p[-1], torch.tensor(1.0))
    close(p[1:] / p[:-1], ((1.0 / 0.05) ** 0.25) * torch.ones(4), 1e-4)
    tables = agf.tables(0, 8)
    expected = (1 + torch.arange(9.0)) ** -p[:, None]
    close(tables.mul, expected)
    assert tables.add is None and tables.value_mul is None
    assert torch.equal(tables.mul[:, 0], torch.ones(5))
    floored = scheme("agf", floor=0.25, tau=3.0).tables(0, 8).mul
    close(floored, 0.25 + 0.75 * (1 + torch.arange(9.0) / 3) ** -scheme("agf").exponents[0][:, None])


def test_pcm_v_multiplies_values_by_the_same_coefficient() -> None:
    tables = scheme("agf+pcm-v").tables(-3, 3)
    assert torch.equal(tables.mul, tables.value_mul)


def test_kerple_is_its_formula() -> None:
    kerple = scheme("kerple")
    r1, r2 = (r[0] for r in kerple.coefficients)
    close(r1, torch.tensor([0.25, 2**-0.5 * 2**-0.1666667, 2**0.6666667, 4.0]), 1e-3)
    close(r2, torch.ones(4))
    scramble(kerple)
    r1, r2 = (r[0][:, None] for r in kerple.coefficients)
    close(kerple.tables(0, 6).add, -r1 * torch.log(1 + r2 * torch.arange(7)))


@pytest.mark.parametrize("kind", ["agf", "agf+pcm-v", "kerple"])
def test_bidirectional_directions_are_told_apart(kind: str) -> None:
    """Each direction has parameters of its own, and a gradient to them alone."""
    position = scheme(kind, causal=False)
    scramble(position)
    tables = position.tables(-3, 3)
    table = tables.mul if tables.mul is not None else tables.add
    past, future = table[:, 4:], table[:, :3].flip(1)
    assert not torch.allclose(past, future)
    past.sum().backward()
    for p in position.parameters():
        assert p.grad[0].abs().sum() > 0 and p.grad[1].abs().sum() == 0
    one = scheme("agf", causal=False, two_sided=False)
    close(one.tables(-3, 3).mul, one.tables(-3, 3).mul.flip(1))


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e6])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("agf", {}), ("agf", {"learn_tau": True}), ("agf+pcm-v", {"learn_tau": True, "floor": 0.2}), ("kerple", {})],
)
def test_decay_survives_large_random_updates(kind: str, options: dict[str, Any], causal: bool, scale: float) -> None:
    """After 100 of them decay is >= 0, c(0) == 1, nothing is inf or NaN, gradients included (CASES 15)."""
    position = scheme(kind, causal=causal, **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        with torch.no_grad():
            for p in position.parameters():
                p.add_(scale * torch.randn(p.shape, generator=generator))
        tables = position.tables(0 if causal else -50, 50)
        table = tables.mul if tables.mul is not None else tables.add
        zero = 0 if causal else 50
        assert table.isfinite().all()
        start = torch.ones(4) if kind != "kerple" else torch.zeros(4)
        torch.testing.assert_close(table[:, zero], start)
        assert (table[:, zero:].diff(dim=1) <= 1e-6).all()
        if not causal:
            assert (table[:, : zero + 1].diff(dim=1) >= -1e-6).all()
        gradients = torch.autograd.grad(table.square().sum(), list(position.parameters()), allow_unused=True)
        assert all(g is None or g.isfinite().all() for g in gradients)
    if kind == "kerple":
        assert all((r > 0).all() for r in position.coefficients)
    else:
        assert (position.exponents >= 0).all()


def test_alibi_slopes_as_published() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    six = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert alibi_slopes(6) == six
    tables = scheme("alibi", heads=6, causal=False).tables(-4, 4)
    close(tables.add, -torch.tensor(six)[:, None] * torch.arange(-4, 5).abs())
    assert not list(scheme("alibi").parameters())


def test_t5_future_is_one_bucket_when_causal() -> None:
    t5 = scheme("t5", buckets=8, max_distance=20)
    add = t5.tables(-5, 200).add
    assert torch.equal(add[:, :6], add[:, :1].expand(-1, 6))
    assert torch.equal(add[:, 25:], add[:, 25:26].expand(-1, 181))
    assert len(add[0].unique()) == 8
    assert len(scheme("t5", causal=False, buckets=8, max_distance=20).tables(-60, 60).add[0].unique()) == 7


@pytest.mark.parametrize(
    "kind", [k for k, p in POSITIONS.items() if p(2, True, PositionSpec(kind=k).options).has_tables]
)
def test_remembered_tables_are_those_computed(kind: str) -> None:
    """Without gradients a table is kept; it is never stale, whatever range is asked for and whatever changed."""
    for causal in (True, False):
        position = scheme(kind, causal=causal)
        for low, high in ((0, 3), (0, 100), (50, 70), (-2 if not causal else 0, 5), (0, 700)):
            fresh = position.tables(low, high)
            with torch.no_grad():
                kept = position.tables(low, high)
            assert kept.delta_min == low
            for name in ("mul", "add", "value_mul"):
                a, b = getattr(fresh, name), getattr(kept, name)
                assert (a is None) == (b is None)
                assert a is None or (a.shape == b.shape == (4, high - low + 1) and torch.equal(a, b))
            scramble(position, seed=high)
        half = position.to(torch.bfloat16)
        with torch.no_grad():
            assert half.tables(0, 5).delta_min == 0


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([2, 4, 6, 8]),
    st.sampled_from([None, 2]),
    st.sampled_from(["half", "interleaved"]),
    st.booleans(),
    st.integers(0, 500),
    st.integers(0, 500),
)
def test_rope_scores_depend_on_distance_alone(
    width: int, dim: int | None, layout: Any, proportional: bool, m: int, n: int
) -> None:
    """<R_m q, R_n k> == <R_{m-n} q, k>, lengths are kept, and position 0 turns nothing."""

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        where = torch.tensor([[position]])
        return Rotation(where, base=100.0, dim=dim, layout=layout, proportional=proportional)(x)

    generator = torch.Generator().manual_seed(width)
    q, k = torch.randn(2, 1, 1, 1, width, generator=generator, dtype=torch.float64)
    close((turned(q, m) * turned(k, n)).sum(), (turned(q, m - n) * k).sum(), 1e-9)
    close(turned(q, m).norm(), q.norm(), 1e-9)
    assert torch.equal(turned(q, 0), q)
    if dim is not None and width > dim and not proportional:
        assert torch.equal(turned(q, m)[..., dim:], q[..., dim:])


def test_rope_in_half_precision_is_turned_in_float32() -> None:
    """Angles at large positions are not rounded to the dtype of the stream."""
    x = torch.randn(1, 1, 1, 8)
    rotation = Rotation(torch.tensor([[4001]]), base=10_000.0)
    close(rotation(x.bfloat16()).float(), rotation(x.bfloat16().float()), 1e-2)
    assert math.isclose(float(rotation.tables(8)[0][0, 0, 0]), math.cos(4001), abs_tol=1e-4)


def test_learned_positions_do_not_wrap() -> None:
    embedding = POSITIONS["learned"].embedding(4, {"max_length": 3})
    assert embedding(torch.tensor([[-1, 0, 2]])).shape == (1, 3, 4)
    assert torch.equal(embedding(torch.tensor([[-1]])), torch.zeros(1, 1, 4))
    with pytest.raises((UserError, ValueError), match="position 3: learned positions go up to 2"):
        embedding(torch.tensor([[3]]))


def test_sinusoidal_is_its_formula() -> None:
    embedding = POSITIONS["sinusoidal"].embedding(6, {"base": 10_000.0})
    out = embedding(torch.tensor([[-1, 0, 7, 300]]))[0]
    assert torch.equal(out[0], torch.zeros(6))
    for row, position in ((1, 0), (2, 7), (3, 300)):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            close(out[row, 2 * i : 2 * i + 2], torch.tensor([math.sin(angle), math.cos(angle)]), 1e-4)
