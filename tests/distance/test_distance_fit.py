"""The fits: parameters recovered from weights of known decay, likelihoods against scipy, the comparison's direction."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from qvattn.lab.distance_fit import FAMILIES, Observations, fit, log_likelihood, most_likely, statistic


def observe(decay: np.ndarray, *, sentences: int = 12, length: int = 40) -> Observations:
    """Queries with 4..length distances, their weights proportional to `decay` (D,) as far as they see."""
    available, sentence, logs, means, profile = [], [], [], [], np.zeros((length, 1))
    for s in range(sentences):
        for n in range(4, length + 1):
            d = np.arange(1, n + 1)
            w = decay[:n] / decay[:n].sum()
            available.append(n)
            sentence.append(s)
            logs.append([(w * np.log(d)).sum()])
            means.append([(w * d).sum()])
            profile[:n, 0] += w
    return Observations(
        available=np.array(available),
        sentence=np.array(sentence),
        log_distance=np.array(logs),
        distance=np.array(means),
        profile=profile,
    )


D = np.arange(1, 41)


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.7, 1.5, 3.0])
def test_a_power_law_is_recovered_whatever_the_lengths(alpha: float) -> None:
    one = fit(observe(D**-alpha))[0]
    assert one.alpha == pytest.approx(alpha, abs=1e-6)
    assert one.gap["power"] < 1e-6
    seen = observe(D**-alpha)
    reached = np.array([(seen.available >= d).sum() for d in D])
    np.testing.assert_allclose(one.curve["power"], seen.profile[:, 0] / reached, atol=1e-7)


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.4, 2.0])
def test_an_exponential_is_recovered(rate: float) -> None:
    one = fit(observe(np.exp(-rate * D)))[0]
    assert one.rate == pytest.approx(rate, abs=1e-6)
    assert one.gap["exponential"] < 1e-6


def test_the_closer_family_is_named() -> None:
    rng = np.random.default_rng(1)

    def noisy(decay: np.ndarray) -> Observations:
        base = observe(decay)
        shake = rng.normal(1, 0.02, (len(base.available), 1))
        return Observations(
            available=base.available,
            sentence=base.sentence,
            log_distance=base.log_distance * shake,
            distance=base.distance * shake,
            profile=base.profile,
        )

    power, exponential = fit(noisy(D**-1.5))[0], fit(noisy(np.exp(-0.3 * D)))[0]
    assert power.better == "power" and power.ratio.mean > 0
    assert exponential.better == "exponential" and exponential.ratio.mean < 0
    assert power.gain["power"] > power.gain["exponential"] > 0
    assert power.gap["power"] < power.gap["exponential"]


def test_equal_weights_decide_nothing() -> None:
    one = fit(observe(np.ones(40)))[0]
    assert one.better is None
    assert one.alpha == pytest.approx(0, abs=1e-6) and one.rate == pytest.approx(0, abs=1e-6)
    assert one.gain["power"] == pytest.approx(0, abs=1e-9)


def test_a_head_that_looks_one_back_is_at_the_bound() -> None:
    decay = np.zeros(40)
    decay[0] = 1.0
    assert set(fit(observe(decay))[0].bounded) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_likelihood_is_scipys(family: str) -> None:
    """The sum of w ln p written out, and its top found by scipy."""
    rng = np.random.default_rng(3)
    available = rng.integers(4, 30, size=25)
    weights = [rng.dirichlet(np.ones(n) * 0.3) for n in available]
    d = np.arange(1, 31)
    seen = Observations(
        available=available,
        sentence=np.arange(25) // 5,
        log_distance=np.array([[(w * np.log(d[: len(w)])).sum()] for w in weights]),
        distance=np.array([[(w * d[: len(w)]).sum()] for w in weights]),
        profile=np.array([sum(w[i] if i < len(w) else 0.0 for w in weights) for i in range(29)])[:, None],
    )

    def negative(theta: float) -> float:
        total = 0.0
        for w in weights:
            logits = -theta * statistic(family, d[: len(w)])  # type: ignore[arg-type]
            total += (w * (logits - np.logaddexp.reduce(logits))).sum()
        return -total

    theta = most_likely(family, seen)  # type: ignore[arg-type]
    assert log_likelihood(family, theta, seen).sum() == pytest.approx(-negative(float(theta[0])), abs=1e-9)  # type: ignore[arg-type]
    best = minimize_scalar(negative, bounds=(-1, 5), method="bounded", options={"xatol": 1e-9})
    assert theta[0] == pytest.approx(best.x, abs=1e-5)


def test_the_interval_is_over_sentences_and_its_mean_over_queries() -> None:
    base = observe(D**-1.0)
    uneven = Observations(
        available=base.available,
        sentence=np.where(np.arange(len(base.available)) < 30, 0, base.sentence + 1),
        log_distance=base.log_distance,
        distance=base.distance,
        profile=base.profile,
    )
    one = fit(uneven)[0]
    a = log_likelihood("power", np.array([one.alpha]), uneven)
    b = log_likelihood("exponential", np.array([one.rate]), uneven)
    assert one.ratio.mean == pytest.approx(float((a - b).mean()))
    assert one.ratio.count == len(set(uneven.sentence.tolist()))
