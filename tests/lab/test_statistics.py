"""Intervals against numbers worked out by hand and against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from qvattn.lab.statistics import estimate, paired_difference, t_quantile

FINITE = st.floats(-1e3, 1e3, allow_nan=False)


def test_three_seeds_by_hand() -> None:
    # mean 2, s = 1, t(2) = 4.30265: half width 4.30265 / sqrt(3)
    result = estimate([1.0, 2.0, 3.0])
    assert result.mean == pytest.approx(2.0)
    assert result.half_width == pytest.approx(4.302652729911275 / math.sqrt(3))
    assert result.count == 3


def test_two_seeds_by_hand() -> None:
    # s = 0.02 / sqrt(2), so s / sqrt(2) = 0.01; t(1) = 12.7062
    result = estimate([0.48, 0.50])
    assert result.mean == pytest.approx(0.49)
    assert result.half_width == pytest.approx(0.127062047)


def test_one_seed_has_no_interval() -> None:
    result = estimate([0.4893])
    assert result.mean == 0.4893
    assert result.half_width is None
    assert not result.excludes_zero


def test_no_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_infinite_value_has_no_interval() -> None:
    assert estimate([1.0, math.inf]).half_width is None


def test_paired_difference_removes_what_seeds_share() -> None:
    baseline = {1: 0.50, 2: 0.40, 3: 0.60, 9: 0.10}
    values = {1: 0.51, 2: 0.41, 3: 0.61, 4: 0.99}
    result = paired_difference(values, baseline)
    assert result is not None
    assert result.count == 3  # seeds 4 and 9 have no partner
    assert result.mean == pytest.approx(0.01)
    assert result.half_width == pytest.approx(0.0, abs=1e-12)


def test_no_shared_seed_is_no_difference() -> None:
    assert paired_difference({1: 0.5}, {2: 0.5}) is None


def test_excludes_zero() -> None:
    assert estimate([0.9, 1.0, 1.1]).excludes_zero
    assert not estimate([-1.0, 1.0, 0.5]).excludes_zero


@given(st.lists(FINITE, min_size=2, max_size=12))
def test_matches_scipy(values: list[float]) -> None:
    result = estimate(values)
    error = float(scipy.stats.sem(values))
    assert result.mean == pytest.approx(float(np.mean(values)), abs=1e-9)
    expected = error * float(scipy.stats.t.ppf(0.975, len(values) - 1))
    assert result.half_width == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(FINITE, FINITE), min_size=2, max_size=8))
def test_paired_interval_matches_scipy_ttest(pairs: list[tuple[float, float]]) -> None:
    ours = paired_difference({i: a for i, (a, _) in enumerate(pairs)}, {i: b for i, (_, b) in enumerate(pairs)})
    assert ours is not None
    assert ours.half_width is not None
    differences = [a - b for a, b in pairs]
    if np.ptp(differences) < 1e-6:
        return
    interval = scipy.stats.ttest_rel([a for a, _ in pairs], [b for _, b in pairs]).confidence_interval(0.95)
    assert ours.mean - ours.half_width == pytest.approx(interval.low, rel=1e-5, abs=1e-7)
    assert ours.mean + ours.half_width == pytest.approx(interval.high, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("degrees", [1, 2, 4, 30, 1000])
def test_quantile(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(float(scipy.stats.t.ppf(0.975, degrees)), rel=1e-9)


@pytest.mark.parametrize(("degrees", "confidence"), [(0, 0.95), (3, 1.0), (3, 0.0)])
def test_quantile_refuses(degrees: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="must"):
        t_quantile(degrees, confidence)
