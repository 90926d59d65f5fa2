"""The native decode kernel against the reference: random requests, every instruction set, one and two threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qvattn.geometry import Geometry
from qvattn.kernels import attend
from qvattn.kernels._native import Native
from qvattn.kernels.cpu import attend_cpu, cpu_refuses
from qvattn.kernels.reference import attend_reference
from qvattn.kernels.terms import ScoreTerm, ValueTerm
from qvattn.positions.base import DistanceTables
from qvattn.quantised import QuantisedStream

from .requests import DTYPES, Request, requests, stream

KEEP = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def distance(out: Tensor, expected: Tensor) -> float:
    """Largest error, relative to the largest entry where that is above 1."""
    if out.numel() == 0:
        return 0.0
    return float((out.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1))


def check(request: Request, scale: float = 0.3) -> None:
    assert cpu_refuses(request.scores, request.value, request.tables, 0.0) is None
    expected, _ = attend_reference(*request.arguments, scale=scale, tables=request.tables)
    out = attend_cpu(*request.arguments, scale=scale, tables=request.tables)
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    assert bool(torch.isfinite(out).all())
    rounding = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[out.dtype]
    if isinstance(request.value.stream, QuantisedStream):
        rounding = max(rounding, 1e-3)
    real = (request.geometry.q_pos >= 0)[:, None, :, None]  # distances from a padding query mean nothing
    assert distance(out * real, expected * real) < (rounding if request.exact else 0.1)


@settings(max_examples=250, deadline=None, suppress_health_check=KEEP, derandomize=True)
@given(request=requests(), threads=st.sampled_from([1, 2]))
def test_equals_the_reference(isa: str, library: Native, request: Request, threads: int) -> None:
    torch.set_num_threads(threads)
    check(request)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [0, 1, 16, 129, 2500])
def test_lengths_and_splits(isa: str, library: Native, dtype: torch.dtype, T: int) -> None:
    """A length of 2500 is split and merged; equal results whatever the threads."""
    torch.manual_seed(0)
    keys, values = stream(2, 2, T, 64, dtype), stream(2, 2, T, 64, dtype)
    positions = torch.arange(T, dtype=torch.int32)[None]
    last = torch.full((1, 1), T, dtype=torch.int32)
    request = Request(
        [ScoreTerm(q=torch.randn(2, 4, 1, 64), stream=keys)],
        ValueTerm(stream=values),
        Geometry(last, positions, causal=True),
        None,
    )
    check(request)
    outs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outs.append(attend_cpu(*request.arguments, scale=0.3))
    assert torch.equal(*outs)


def test_large_scores(isa: str) -> None:
    """Scores that grow along the keys move the shift of the softmax again and again; far ones weigh nothing."""
    T = 600
    keys = torch.linspace(-1, 1, T)[None, None, :, None].repeat(1, 1, 1, 16)
    request = Request(
        [ScoreTerm(q=torch.full((1, 1, 1, 16), 50.0), stream=keys)],
        ValueTerm(stream=torch.randn(1, 1, T, 16)),
        Geometry(torch.full((1, 1), T, dtype=torch.int32), torch.arange(T, dtype=torch.int32)[None], causal=True),
        None,
    )
    check(request, scale=1.0)
    falling = Request([ScoreTerm(q=-request.scores[0].q, stream=keys)], request.value, request.geometry, None)
    check(falling, scale=1.0)


def test_not_a_number_is_not_hidden(isa: str) -> None:
    keys = torch.randn(1, 1, 40, 16)
    keys[0, 0, 20, 3] = float("nan")
    geometry = Geometry(torch.tensor([[39]]), torch.arange(40)[None], causal=True)
    out = attend_cpu([ScoreTerm(q=torch.randn(1, 1, 1, 16), stream=keys)], ValueTerm(stream=keys), geometry, scale=1.0)
    assert bool(out.isnan().all())


def test_negative_value_factors_in_int8(isa: str) -> None:
    """Weights may be negative after `value_mul`; products of unsigned bytes must know."""
    torch.manual_seed(1)
    v = stream(1, 2, 50, 72, torch.int8)
    geometry = Geometry(torch.tensor([[49]], dtype=torch.int32), torch.arange(50, dtype=torch.int32)[None], causal=True)
    tables = DistanceTables(0, value_mul=torch.randn(2, 60))
    check(Request([ScoreTerm(q=torch.randn(1, 2, 1, 72), stream=v)], ValueTerm(stream=v), geometry, tables))
    tables = DistanceTables(0, value_mul=-torch.rand(2, 60))
    check(Request([ScoreTerm(q=torch.randn(1, 2, 1, 72), stream=v)], ValueTerm(stream=v), geometry, tables))


def test_left_padded_rows_equal_their_solo_runs(library: Native) -> None:
    torch.manual_seed(0)
    lengths, T = (2, 90, 33), 90
    k = torch.randn(3, 2, T, 24)
    k_pos = torch.stack([torch.arange(T) - (T - n) for n in lengths]).clamp(min=-1).to(torch.int32)
    q, term = torch.randn(3, 4, 1, 24), ValueTerm(stream=k)
    out = attend_cpu([ScoreTerm(q=q, stream=k)], term, Geometry(k_pos[:, -1:], k_pos, causal=True), scale=0.2)
    for b, n in enumerate(lengths):
        solo = k[b : b + 1, :, T - n :]
        alone = attend_cpu(
            [ScoreTerm(q=q[b : b + 1], stream=solo)],
            ValueTerm(stream=solo),
            Geometry(k_pos[b : b + 1, -1:], k_pos[b : b + 1, T - n :], causal=True),
            scale=0.2,
        )
        torch.testing.assert_close(out[b : b + 1], alone, rtol=1e-5, atol=1e-6)


def test_streams_may_be_any_strided_view(library: Native) -> None:
    """Rows shared by a whole batch, heads inside the width: strides are used, nothing is copied."""
    torch.manual_seed(0)
    tokens = torch.randn(1, 70, 3 * 16)  # (B, T, heads * D), as a projection leaves it
    k = tokens.view(1, 70, 3, 16).transpose(1, 2).expand(2, -1, -1, -1)
    geometry = Geometry(torch.full((2, 1), 69), torch.arange(70)[None].expand(2, -1), causal=True)
    check(Request([ScoreTerm(q=torch.randn(2, 3, 1, 16), stream=k)], ValueTerm(stream=k), geometry, None))


def test_attend_chooses_it_and_applies_the_lift(library: Native) -> None:
    torch.manual_seed(0)
    k, lift = torch.randn(1, 1, 30, 16), torch.randn(4, 16, 6)
    geometry = Geometry(torch.tensor([[29]]), torch.arange(30)[None], causal=True)
    arguments = [ScoreTerm(q=torch.randn(1, 4, 1, 16), stream=k)], ValueTerm(stream=k, lift=lift), geometry
    with torch.no_grad():
        torch.testing.assert_close(
            attend(*arguments, scale=0.25), attend(*arguments, scale=0.25, impl="reference"), rtol=1e-5, atol=1e-5
        )
