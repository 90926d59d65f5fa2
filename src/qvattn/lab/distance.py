"""Attention against distance: how far each head of a trained model looks, whatever its position scheme.

Per layer and head, over real sentences, teacher-forced:

    attention    mean weight at distance d, over the queries that see a key there
    score        mean of q . k * scale at distance d, before any table over distance (after a rotation)
    cosine       mean of the same as a cosine: how alike query and key are, whatever their lengths
    fit          power law against exponential, see `distance_fit`

Self-attention only: a cross-attention has no distances. The encoder is looked at in both directions, each for itself.
One key is left out of the fits, because its weight is about what it is and not about where: the first of a causal
model (attention's resting place, or a start token), the last of an encoder (end of sentence). So is the query's own.
What the two take is reported beside the fits.

Reads only. Attention shows where a head looks, not what the model uses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import spearmanr
from torch import Tensor

from ..attention import Attention
from ..kernels.terms import per_query_head
from ..models import Stack, TranslationModel, Watched
from ..positions.agf import AGF
from ..variants import Terms
from .check.spying import spying
from .check.subject import Subject
from .distance_fit import FAMILIES, Fit, Observations, fit

Place = Literal["encoder", "decoder"]
Side = Literal["past", "future"]
LEAST = 4
"""Distances a query must have, on one side, to say anything about the decay."""
ENOUGH_QUERIES = 20
"""Queries from which a place is fitted."""
Floats = npt.NDArray[np.float64]


@dataclass
class Tally:
    """Sums over queries at every distance 0..D-1 of one side, (L, H, D), and what the fits need."""

    length: int
    pairs: Floats = field(init=False)
    attention: Any = 0.0
    score: Any = 0.0
    squares: Any = 0.0
    cosine: Any = 0.0
    profile: Any = 0.0
    log_distance: list[Floats] = field(default_factory=list)
    distance: list[Floats] = field(default_factory=list)
    available: list[npt.NDArray[np.int64]] = field(default_factory=list)
    sentence: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pairs = np.zeros(self.length)


@dataclass
class PlaceTally:
    """All sides of one place. own, rest: weight of the query's own key and of the key left out, summed over queries."""

    sides: dict[Side, Tally]
    causal: bool
    queries: int = 0
    own: Any = 0.0
    rest: Any = 0.0


def measure(subject: Subject) -> dict[str, Any]:
    """All measures over the subject's sentences, in JSON's types; see the module."""
    longest = max(max(s.length, 0 if s.source is None else s.source.shape[1]) for s in subject.samples)
    tallies: dict[Place, PlaceTally] = {}
    stacks: dict[Place, Stack] = {}
    for index, _ in enumerate(subject.samples):
        for place, stack, weights, scores, cosines in watched(subject, index):
            stacks[place] = stack
            causal = stack.spec.causal
            sides: tuple[Side, ...] = ("past",) if causal else ("past", "future")
            tally = tallies.setdefault(place, PlaceTally({s: Tally(longest) for s in sides}, causal))
            _add(tally, index, weights, scores, cosines)
    return {
        "run": subject.name,
        "data": subject.data,
        "sentences": len(subject.samples),
        "variant": subject.model.attention_spec.model_dump(mode="json", exclude_none=True),
        "places": {place: _place(tally, stacks[place]) for place, tally in tallies.items()},
    }


@torch.no_grad()
def watched(subject: Subject, index: int) -> Iterator[tuple[Place, Stack, Floats, Floats, Floats]]:
    """Of one sentence, at each place with self-attention: weights, scores and cosines, each (L, H, T, T)."""
    model, sample = subject.model, subject.samples[index]
    if isinstance(model, TranslationModel) and sample.source is not None:
        kept = Watched()
        with spying(model.encoder) as seen:
            model.encode(sample.source, None, kept)
        yield "encoder", model.encoder, *_arrays(model.encoder, kept, [one.terms[-1] for one in seen if not one.cross])
    kept = Watched()
    with spying(model.decoder_stack) as seen:
        subject.readers[index].full(watched=kept)
    terms = [one.terms[-1] for one in seen if not one.cross]
    yield "decoder", model.decoder_stack, *_arrays(model.decoder_stack, kept, terms)


def _arrays(stack: Stack, kept: Watched, terms: Sequence[Terms]) -> tuple[Floats, Floats, Floats]:
    pairs = [content(block.self_attn, one) for block, one in zip(stack.blocks(), terms, strict=True)]
    scored, alike = zip(*pairs, strict=True)
    stacked = (torch.stack(list(parts))[:, 0] for parts in (kept.self_weights, scored, alike))
    weights, scores, cosines = (x.double().cpu().numpy() for x in stacked)
    return weights, scores, cosines


def content(attention: Attention, terms: Terms) -> tuple[Tensor, Tensor]:
    """Scores and cosines of queries and keys (1, H, T, T), from what a kernel was given; no table over distance."""
    heads = attention.spec.n_heads
    parts = [(t.q.double(), per_query_head(t.keys().double(), heads, t.groups)) for t in terms.scores]
    dots = functools.reduce(torch.add, [q @ k.mT for q, k in parts])
    q_size, k_size = (functools.reduce(torch.add, [x[i].square().sum(-1) for x in parts]).sqrt() for i in (0, 1))
    return dots * attention.variant.scale, dots / (q_size[..., None] * k_size[..., None, :]).clamp(min=1e-12)


def _add(tally: PlaceTally, sentence: int, weights: Floats, scores: Floats, cosines: Floats) -> None:
    """Sum up one sentence, each array (L, H, T, T)."""
    length = weights.shape[-1]
    m, n = np.indices((length, length))
    left_out = 0 if tally.causal else length - 1
    asking = np.arange(length) != left_out
    tally.queries += int(asking.sum())
    tally.own = tally.own + np.diagonal(weights, axis1=2, axis2=3)[..., asking].sum(-1)
    tally.rest = tally.rest + weights[:, :, asking, left_out].sum(-1)
    for side, one in tally.sides.items():
        delta = m - n if side == "past" else n - m
        within = (delta >= 0) & asking[:, None] & (n != left_out)
        at = delta[within]
        one.pairs += np.bincount(at, minlength=one.length)
        for name, values in (("attention", weights), ("score", scores), ("squares", scores**2), ("cosine", cosines)):
            setattr(one, name, getattr(one, name) + _by_distance(values[..., within], at, one.length))
        _observe(one, sentence, weights, delta, within & (delta > 0))


def _by_distance(values: Floats, at: npt.NDArray[np.int64], length: int) -> Floats:
    """(L, H, N) summed into (L, H, length)."""
    rows = values.reshape(-1, values.shape[-1])
    sums = np.array([np.bincount(at, weights=row, minlength=length) for row in rows], dtype=np.float64)
    return sums.reshape(*values.shape[:2], length)


def _observe(tally: Tally, sentence: int, weights: Floats, delta: Any, within: Any) -> None:
    """What the fits need of one sentence: weights (L, H, T, T) at distances of 1 and more, rescaled to one a query."""
    available = within.sum(axis=1)
    rows = np.flatnonzero(available >= LEAST)
    if not len(rows):
        return
    kept, distances = within[rows], np.where(within[rows], delta[rows], 1)
    share = np.where(kept, weights[:, :, rows], 0.0)
    total = share.sum(axis=-1, keepdims=True)
    # a query that looks nowhere else at all is as good as one that looks everywhere alike
    share = np.where(total > 1e-12, share / np.maximum(total, 1e-12), kept / available[rows][:, None])
    flat = share.reshape(-1, *share.shape[2:])
    tally.log_distance.append((flat * np.log(distances)).sum(-1).T)
    tally.distance.append((flat * distances).sum(-1).T)
    tally.available.append(available[rows])
    tally.sentence.append(np.full(len(rows), sentence))
    tally.profile = tally.profile + _by_distance(share[..., kept], distances[kept], tally.length)


# -- results -----------------------------------------------------------------------------------------------------


def _place(tally: PlaceTally, stack: Stack) -> dict[str, Any]:
    specs = stack.specs
    exponents = [_exponents(block.self_attn) for block in stack.blocks()]
    own, rest = (x / max(tally.queries, 1) for x in (tally.own, tally.rest))
    sides = {side: _side(one) for side, one in tally.sides.items()}
    heads: list[dict[str, Any]] = []
    for layer, spec in enumerate(specs):
        for head in range(spec.n_heads):
            agf = exponents[layer]
            heads.append(
                {
                    "layer": layer,
                    "index": head,
                    "own": float(own[layer, head]),
                    "left_out": float(rest[layer, head]),
                    "agf": None if agf is None else {name: values[head] for name, values in agf.items()},
                    **{side: made[layer * spec.n_heads + head] for side, made in sides.items() if made},
                }
            )
    return {"queries": tally.queries, "left_out": "first" if tally.causal else "last", "heads": heads}


def _exponents(attention: Attention) -> dict[str, list[float]] | None:
    """The learned p_h of a layer with AGF: of past keys, and of future ones where they have their own."""
    if not isinstance(attention.position, AGF):
        return None
    past, *future = attention.position.exponents.detach().tolist()
    return {"past": past, **({"future": future[0]} if future else {})}


def _side(tally: Tally) -> list[dict[str, Any]]:
    """One entry a head, layer by layer; empty where there is too little to fit."""
    if sum(map(len, tally.available)) < ENOUGH_QUERIES:
        return []
    distances = np.flatnonzero(tally.pairs)
    count = tally.pairs[distances]
    heads = tally.attention.shape[0] * tally.attention.shape[1]
    profile = np.asarray(tally.profile).reshape(heads, -1)[:, 1:].T
    seen = Observations(
        available=np.concatenate(tally.available),
        sentence=np.concatenate(tally.sentence),
        log_distance=np.concatenate(tally.log_distance),
        distance=np.concatenate(tally.distance),
        profile=profile[: max(int(a.max()) for a in tally.available)],
    )
    means = {
        name: (getattr(tally, name).reshape(heads, -1)[:, distances] / count)
        for name in ("attention", "score", "squares", "cosine")
    }
    reached = np.array([(seen.available >= d).sum() for d in range(1, len(seen.profile) + 1)])
    return [
        {
            "distance": distances.tolist(),
            "pairs": count.astype(int).tolist(),
            "attention": _rounded(means["attention"][k]),
            "score": _rounded(means["score"][k]),
            "score_deviation": _rounded(np.sqrt(np.maximum(means["squares"][k] - means["score"][k] ** 2, 0.0))),
            "cosine": _rounded(means["cosine"][k]),
            "share": _rounded(seen.profile[:, k] / reached),
            "fit": _fit(one),
        }
        for k, one in enumerate(fit(seen))
    ]


def _fit(one: Fit) -> dict[str, Any]:
    return {
        "alpha": one.alpha,
        "rate": one.rate,
        "bounded": list(one.bounded),
        "ratio": one.ratio.model_dump(),
        "better": one.better,
        "gain": dict(one.gain),
        "gap": dict(one.gap),
        "curve": {family: _rounded(one.curve[family]) for family in FAMILIES},
    }


def _rounded(values: Floats) -> list[float]:
    return [float(f"{x:.5g}") for x in values]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One side of one place of one run: how its heads decay.

    power, exponential, open: heads that are closer to either, and heads whose interval holds zero.
    alpha: (least, median, largest) exponent of the power law.  reach: likewise, distance at which the exponential has
    fallen to a half.  ratio: median over heads, nats per query, above zero in favour of the power law.
    gap: median of the better family's.  agf: (least, median, largest) learned exponent; agreement: rank correlation
    between learned and fitted exponents over the heads.
    """

    place: Place
    side: Side
    power: int
    exponential: int
    open: int
    alpha: tuple[float, float, float]
    half: tuple[float, float, float]
    ratio: float
    gap: float
    agf: tuple[float, float, float] | None
    agreement: float | None


def summary(result: dict[str, Any]) -> list[Line]:
    """A line per place and side of one run's `measure`."""
    lines = []
    for place, found in result["places"].items():
        for side in ("past", "future"):
            heads = [head for head in found["heads"] if side in head]
            if heads:
                lines.append(_line(place, side, heads))
    return lines


def _line(place: Place, side: Side, heads: list[dict[str, Any]]) -> Line:
    fits = [head[side]["fit"] for head in heads]
    learned = [head["agf"].get(side, head["agf"]["past"]) for head in heads if head["agf"] is not None]
    alphas = [one["alpha"] for one in fits]
    halves = [np.log(2) / one["rate"] if one["rate"] > 0 else np.inf for one in fits]
    counts = [one["better"] for one in fits]
    return Line(
        place=place,
        side=side,
        power=counts.count("power"),
        exponential=counts.count("exponential"),
        open=counts.count(None),
        alpha=_spread(alphas),
        half=_spread(halves),
        ratio=float(np.median([one["ratio"]["mean"] for one in fits])),
        gap=float(np.median([min(one["gap"].values()) for one in fits])),
        agf=_spread(learned) if learned else None,
        agreement=float(spearmanr(learned, alphas).statistic) if len(set(learned)) > 2 else None,
    )


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return float(np.min(values)), float(np.median(values)), float(np.max(values))
