"""Power law against exponential, for weights over distances of which every query has a different number.

A query at position m spreads its weights w(d) over the distances d = 1..n that it sees. Two models of one parameter:

    power law     p(d | n) = d^-alpha / sum_{k<=n} k^-alpha
    exponential   p(d | n) = exp(-lambda d) / sum_{k<=n} exp(-lambda k)

Each is normalised over the distances that the query has, so a distance that few queries reach is neither rare nor
frequent for that reason. Weights count as fractions of one observation per query: l = sum_d w(d) ln p(d | n). Both
parameters are fitted by maximum likelihood, and the two are compared by the difference of their log-likelihoods, as
Clauset, Shalizi and Newman (SIAM Review 51, 2009, section 5) do after Vuong (Econometrica 57, 1989). Queries of one
sentence are not independent, so the interval is a t-interval over sentences, not over queries. The comparison says
which of the two is closer, not that either is true: `gap` says how far off each is.

Nothing here knows of models or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .statistics import Estimate, estimate

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Family = Literal["power", "exponential"]
FAMILIES: tuple[Family, ...] = ("power", "exponential")
BOUNDS: dict[Family, tuple[float, float]] = {"power": (-4.0, 12.0), "exponential": (-1.0, 12.0)}
"""Where a parameter is looked for; a head that only ever looks one token back has no finite one."""
ROUNDING = 1e-9
"""Nats per query below which a difference of likelihoods is arithmetic."""
_HALVINGS = 50


@dataclass(frozen=True, kw_only=True)
class Observations:
    """Weights of N queries of K heads, as far as the fits need them.

    available: (N,) distances n of each query.  sentence: (N,) which sentence it stands in.
    log_distance, distance: (N, K) sums over d of w(d) ln d and of w(d) d, where w adds up to one.
    profile: (D, K) sums over queries of w(d), for d = 1..D.
    """

    available: Ints
    sentence: Ints
    log_distance: Floats
    distance: Floats
    profile: Floats


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One head. alpha, rate: the parameters; at a bound they are only a limit (`bounded`).

    ratio: log-likelihood of the power law less that of the exponential, nats per query, over sentences.
    gain: of each family, log-likelihood less that of equal weights, nats per query.
    gap: of each family, the largest distance between its cumulated weights over all queries and the measured ones.
    curve: of each family, the weights it expects at each distance, averaged over queries that have it.
    """

    alpha: float
    rate: float
    bounded: tuple[Family, ...]
    ratio: Estimate
    gain: dict[Family, float]
    gap: dict[Family, float]
    curve: dict[Family, Floats]

    @property
    def better(self) -> Family | None:
        """The family whose likelihood is higher, where the interval over sentences leaves out zero."""
        if not self.ratio.excludes_zero or abs(self.ratio.mean) < ROUNDING:
            return None
        return "power" if self.ratio.mean > 0 else "exponential"


def statistic(family: Family, distances: Ints) -> Floats:
    """f(d) of p(d) ~ exp(-theta f(d))."""
    return np.log(distances) if family == "power" else distances.astype(np.float64)


def normalisers(family: Family, theta: Floats, longest: int) -> Floats:
    """(K, D): ln of the sum over d <= n of exp(-theta f(d)), for n = 1..D."""
    f = statistic(family, np.arange(1, longest + 1))
    return np.logaddexp.accumulate(-theta[:, None] * f, axis=1)


def expectations(family: Family, theta: Floats, longest: int) -> Floats:
    """(K, D): the mean of f(d) over d <= n, for n = 1..D."""
    f = statistic(family, np.arange(1, longest + 1))
    with np.errstate(divide="ignore"):
        weighted = np.logaddexp.accumulate(np.log(f) - theta[:, None] * f, axis=1)
    means: Floats = np.exp(weighted - normalisers(family, theta, longest))
    return means


def most_likely(family: Family, seen: Observations) -> Floats:
    """(K,) maximum-likelihood parameters, within BOUNDS.

    The likelihood is concave: at its top the model's mean of f, over all queries, is the measured one. It is halved to.
    """
    sums = (seen.log_distance if family == "power" else seen.distance).sum(axis=0)
    longest = int(seen.available.max())
    share = np.bincount(seen.available, minlength=longest + 1)[1:].astype(np.float64)
    low, high = (np.full(len(sums), bound) for bound in BOUNDS[family])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        too_far = expectations(family, middle, longest) @ share > sums
        low, high = np.where(too_far, middle, low), np.where(too_far, high, middle)
    return (low + high) / 2


def log_likelihood(family: Family, theta: Floats, seen: Observations) -> Floats:
    """(N, K) of each query."""
    f = seen.log_distance if family == "power" else seen.distance
    z = normalisers(family, theta, int(seen.available.max()))
    likelihood: Floats = -theta * f - z[:, seen.available - 1].T
    return likelihood


def expected_profile(family: Family, theta: Floats, seen: Observations) -> Floats:
    """(D, K): sums over queries of the model's weights, to be held against `profile`."""
    longest = len(seen.profile)
    f = statistic(family, np.arange(1, longest + 1))
    z = normalisers(family, theta, longest)
    share = np.bincount(seen.available, minlength=longest + 1)[1 : longest + 1]
    n = np.flatnonzero(share) + 1
    out = np.zeros_like(seen.profile)
    for own, count in zip(n, share[n - 1], strict=True):
        out[:own] += count * np.exp(-theta[:, None] * f[:own] - z[:, own - 1 : own]).T
    return out


def fit(seen: Observations) -> list[Fit]:
    """Both families for each of the K heads."""
    queries = len(seen.available)
    sentences, index = np.unique(seen.sentence, return_inverse=True)
    thetas = {family: most_likely(family, seen) for family in FAMILIES}
    likelihoods = {family: log_likelihood(family, thetas[family], seen) for family in FAMILIES}
    profiles = {family: expected_profile(family, thetas[family], seen) for family in FAMILIES}
    equal = -np.log(seen.available).sum()
    reached = np.cumsum(np.bincount(seen.available, minlength=len(seen.profile) + 1)[::-1])[::-1][1:]
    fits = []
    for k in range(seen.profile.shape[1]):
        pointwise = likelihoods["power"][:, k] - likelihoods["exponential"][:, k]
        # a ratio of sums over sentences: its deviations are those from the mean over queries, so that a long sentence
        # counts as much as its queries and does not widen the interval by being long
        mean = pointwise.mean()
        per_sentence = mean + np.bincount(index, weights=pointwise - mean) * len(sentences) / queries
        fits.append(
            Fit(
                alpha=float(thetas["power"][k]),
                rate=float(thetas["exponential"][k]),
                bounded=tuple(family for family in FAMILIES if _at_bound(family, float(thetas[family][k]))),
                ratio=estimate([float(x) for x in per_sentence]),
                gain={family: float(likelihoods[family][:, k].sum() - equal) / queries for family in FAMILIES},
                gap={family: _gap(profiles[family][:, k], seen.profile[:, k], queries) for family in FAMILIES},
                curve={family: profiles[family][:, k] / np.maximum(reached, 1) for family in FAMILIES},
            )
        )
    return fits


def _at_bound(family: Family, theta: float) -> bool:
    low, high = BOUNDS[family]
    return min(theta - low, high - theta) < 1e-6


def _gap(model: Floats, measured: Floats, queries: int) -> float:
    return float(np.abs(np.cumsum(model - measured)).max()) / queries
