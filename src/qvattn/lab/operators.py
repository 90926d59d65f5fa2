"""Operator freedom: what each head compares, M_h = W_Q,h W_K,h^T, and how much of it other variants could represent.

A score is x_m^T M_h x_n for the inputs x of attention (after the norm). The factors are found by sending the identity
through a variant's own projections, so nothing here knows a variant by name; one whose score is not bilinear in x
(normed queries, keys or latents) is refused.

Under RoPE a head is a family of operators, M_h(delta) = sum over frequency pairs f of q_f R_f(delta) k_f^T. Measured
are "offset 0", the operator without rotation, and "every offset", the mean over all rotations with the phases of
different pairs independent: pairs of different frequencies cannot stand in for each other there.

Only weights are read; what a model loses when a head is replaced, and what training wins back, is not measured here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import Attention
from ..errors import UserError
from ..kernels.terms import per_query_head
from ..positions import POSITIONS
from .diffusion import effective_rank

OFFSET_0, EVERY_OFFSET = "offset 0", "every offset"
ROUNDS = 8
"""Of the alternating least squares that finds a context shared by heads whose values are kept."""

_LINEAR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Factors of one attention layer, float64.

    query, key: (H, E, D), M_h = query_h key_h^T.  value: (H, E, Dv), what each query head sums.
    pairs: indices (P, 2) of elements that RoPE turns together; the others are not turned.
    """

    place: str
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    pairs: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.long))

    def at_random(self) -> Heads:
        """Random factors of the same sizes that share where these share: what any residual has to be compared with."""
        draw = torch.Generator().manual_seed(0)

        def like(factors: Tensor) -> Tensor:
            fresh = torch.randn(factors.shape, generator=draw, dtype=factors.dtype)
            return fresh[_same(factors)]

        return replace(self, query=like(self.query), key=like(self.key), value=like(self.value))

    @property
    def shared(self) -> list[int]:
        """For each head the first head of the same key."""
        return _same(self.key)

    def weighed(self, moment: Tensor) -> Heads:
        """Factors for inputs of second moment C (E, E): M becomes C^1/2 M C'^1/2, so that squared norms are mean
        squared scores of independent inputs; C' is C without its mean, which no softmax over keys sees.
        """
        mean = moment[:, -1]
        full, centred = moment[:, :-1], moment[:, :-1] - mean[:, None] * mean
        q_root, k_root = _root(full), _root(centred)
        return replace(self, query=q_root @ self.query, key=k_root @ self.key, value=k_root @ self.value)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.mT


def _same(factors: Tensor) -> list[int]:
    return [next(i for i in range(h + 1) if torch.equal(factors[i], factors[h])) for h in range(len(factors))]


def heads_of(attention: Attention, place: str, layer: int) -> Heads:
    """The factors of a layer, by its own projections. Raises UserError where its score is not bilinear."""
    variant = copy.deepcopy(attention.variant).double()
    E = attention.spec.d_model

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        terms = variant.expand(variant.queries(x, None), variant.entries(x, None), None)
        q = torch.cat([term.q for term in terms.scores], dim=-1)
        H = q.shape[1]
        k = torch.cat([per_query_head(term.keys(), H, term.groups) for term in terms.scores], dim=-1)
        return q[0], k[0], per_query_head(terms.value.values(), H, terms.value.groups)[0]

    with torch.no_grad():
        zero = parts(torch.zeros(1, 1, E, dtype=torch.float64))
        factors = [one - base for one, base in zip(parts(torch.eye(E, dtype=torch.float64)[None]), zero, strict=True)]
        probe = torch.linspace(-1, 1, 3 * E, dtype=torch.float64).reshape(1, 3, E).sin()
        for one, base, made in zip(parts(probe), zero, factors, strict=True):
            if (one - base - probe[0] @ made).norm() > _LINEAR * one.norm():
                raise UserError(
                    f"{place} layer {layer + 1}: the score of variant {attention.spec.variant!r} is not bilinear in "
                    "the layer's input (queries, keys or latents are normed), so there is no M = W_Q W_K^T to look at"
                )
    q, k, v = factors
    return Heads(place=place, layer=layer, query=q, key=k, value=v, pairs=_pairs(attention, q.shape[-1]))


def _pairs(attention: Attention, width: int) -> Tensor:
    """Which elements of a query RoPE turns together, found by turning unit vectors."""
    position = attention.spec.position
    if not POSITIONS[position.kind].rotary:
        return torch.empty(0, 2, dtype=torch.long)
    spec = attention.spec
    zero, one = (attention.position.rotation(torch.tensor([[p]])) for p in (0, 1))
    x = torch.eye(spec.d_model)[None]
    with torch.no_grad():
        variant = attention.variant
        still, turned = variant.queries(x, zero), variant.queries(x, one)
    offset, found = 0, []
    for name, q in still.items():
        if torch.equal(q, turned[name]):
            offset += q.shape[-1]
            continue
        assert one is not None
        found.append(offset + _turned_together(one, q.shape[-1]))
        offset += q.shape[-1]
    return torch.cat(found) if found else torch.empty(0, 2, dtype=torch.long)


def _turned_together(rotation: Any, width: int) -> Tensor:
    moved = rotation(torch.eye(width)[None, :, None])[0, :, 0]  # row i: where unit vector i goes
    partner = (moved - torch.diag(moved.diagonal())).abs()
    pairs = [(i, int(partner[i].argmax())) for i in range(width) if float(partner[i].max()) > 0]
    return torch.tensor([p for p in pairs if p[0] < p[1]], dtype=torch.long).reshape(-1, 2)


# -- what there is -----------------------------------------------------------------------------------------------


def ranks(heads: Heads) -> list[float]:
    """Effective rank of each M_h without rotation (Roy and Vetterli 2007); at most the head's width."""
    found = []
    for q, k in zip(heads.query, heads.key, strict=True):
        singular = torch.linalg.svdvals(torch.linalg.qr(q).R @ torch.linalg.qr(k).R.mT)
        found.append(effective_rank(singular.numpy()))
    return found


@dataclass(frozen=True, kw_only=True)
class Angles:
    """Principal angles, in degrees, between the query spaces of two heads that share a key.

    overlap: mean squared cosine; chance: the same for random spaces of these sizes, D / E.
    alike: cosine between the two operators as vectors.
    """

    heads: tuple[int, int]
    smallest: float
    median: float
    largest: float
    overlap: float
    chance: float
    alike: float


def angles(heads: Heads) -> list[Angles]:
    """For every pair of heads that share a key: how different the two questions are that they ask of it."""
    shared, (_, E, D) = heads.shared, heads.query.shape
    spaces = [torch.linalg.qr(q).Q for q in heads.query]
    found = []
    for b in range(len(shared)):
        for a in range(b):
            if shared[a] != shared[b]:
                continue
            cosines = torch.linalg.svdvals(spaces[a].mT @ spaces[b]).clamp(max=1)
            degrees = torch.rad2deg(torch.acos(cosines))
            gram = heads.key[a].mT @ heads.key[a]
            inner = [torch.trace(gram @ heads.query[i].mT @ heads.query[j]) for i, j in ((a, b), (a, a), (b, b))]
            found.append(
                Angles(
                    heads=(a, b),
                    smallest=float(degrees.min()),
                    median=float(degrees.median()),
                    largest=float(degrees.max()),
                    overlap=float((cosines**2).mean()),
                    chance=D / E,
                    alike=float(inner[0] / (inner[1] * inner[2]).sqrt()),
                )
            )
    return found


# -- what other variants could represent -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be represented: rows (H, D, E) such that a key's error dK costs |rows with k replaced by dK|^2.

    With the query free, only its size along each key element counts: M_h = Q_h K_h^T has the norm of R_h K_h^T, where
    Q_h = U_h R_h; under rotation, mean over all offsets, R_h is diagonal with the query's size in each pair.
    """

    rows: Tensor
    heads: Heads
    rotated: bool

    @property
    def sizes(self) -> Tensor:
        """Squared norm of each head's operator (H,)."""
        return (self.rows**2).sum(dim=(1, 2))

    def residuals(self, left: Tensor) -> list[float]:
        """Relative residual |M - M'| / |M| of each head from what is left of its rows (H, D, E)."""
        return ((left**2).sum(dim=(1, 2)) / self.sizes.clamp(min=1e-300)).sqrt().tolist()


def target(heads: Heads, *, rotated: bool) -> Target:
    """The operators at offset 0, or under rotation at every offset."""
    if not rotated:
        left = torch.linalg.qr(heads.query).R
        return Target(rows=left @ heads.key.mT, heads=heads, rotated=False)
    H, _, D = heads.query.shape
    left = torch.zeros(H, D, D, dtype=heads.query.dtype)
    still = [i for i in range(D) if i not in heads.pairs.flatten().tolist()]
    if still:
        factor = torch.linalg.qr(heads.query[:, :, still]).R
        for row in range(factor.shape[1]):
            left[:, still[row], still] = factor[:, row]
    for pair in heads.pairs:
        size = heads.query[:, :, pair].norm(dim=(1, 2)) / 2**0.5
        left[:, pair, pair] = size[:, None].expand(-1, 2)
    return Target(rows=left @ heads.key.mT, heads=heads, rotated=True)


def _outside(rows: Tensor, space: Tensor) -> Tensor:
    """What is left of rows (..., E) outside the span of the columns of `space` (E, C)."""
    basis = _basis(space)
    return rows - (rows @ basis) @ basis.mT


def _basis(space: Tensor) -> Tensor:
    u, s, _ = torch.linalg.svd(space, full_matrices=False)
    return u[:, s > 1e-10 * s.max().clamp(min=1e-300)]


def _leading(rows: Tensor, count: int) -> Tensor:
    """The `count` directions (E, count) that hold most of rows (N, E)."""
    values, vectors = torch.linalg.eigh(rows.mT @ rows)
    del values
    return vectors[:, -count:]


def shared_keys(t: Target, groups: int) -> Tensor:
    """What is left if the heads of each of `groups` groups share one key of the same width (GQA; MQA: one group)."""
    H, D, E = t.rows.shape
    left = []
    for group in t.rows.split(H // groups):
        if not t.rotated:
            left.append(_outside(group, _leading(group.reshape(-1, E), D)))
            continue
        rest = group.clone()
        turned = t.heads.pairs.flatten().tolist()
        still = [i for i in range(D) if i not in turned]
        if still:
            rest[:, still] = _outside(group[:, still], _leading(group[:, still].reshape(-1, E), len(still)))
        for pair in t.heads.pairs:
            rest[:, pair] = _one_pair(group[:, pair])
        left.append(rest)
    return torch.cat(left)


def _one_pair(rows: Tensor) -> Tensor:
    """What is left of pairs (n, 2, E) if all share one: a pair is a complex vector, a query may turn and scale it."""
    vectors = torch.complex(rows[:, 0], rows[:, 1])
    u, s, v = torch.linalg.svd(vectors, full_matrices=False)
    rest = vectors - s[0] * u[:, :1] @ v[:1]
    return torch.stack((rest.real, rest.imag), dim=1)


def from_own_value(t: Target) -> Tensor:
    """What is left if each head's key is a linear map of the value it sums, values kept (QV, keyless, K = V)."""
    return torch.stack([_outside(rows, value) for rows, value in zip(t.rows, t.heads.value, strict=True)])


def from_all_values(t: Target) -> Tensor:
    """What is left if keys are made from all values of the layer, values kept."""
    return _outside(t.rows, _joined(t.heads.value))


def _joined(values: Tensor) -> Tensor:
    distinct = sorted(set(_same(values)))
    return torch.cat([values[i] for i in distinct], dim=1)


def from_value_and_context(t: Target, size: int) -> Tensor:
    """What is left if keys are made from each head's value, kept, and a context of `size` for all heads (QV-Ka).

    The context is the best for what the values leave over, then improved by alternating least squares: an upper bound.
    """
    E = t.rows.shape[-1]
    context = _leading(from_own_value(t).reshape(-1, E), size)
    groups = [(i, [h for h, first in enumerate(_same(t.heads.value)) if first == i]) for i in _same(t.heads.value)]
    groups = list({i: (i, members) for i, members in groups}.values())
    for _ in range(ROUNDS):
        squares, product = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, E, dtype=torch.float64)
        for first, members in groups:
            value = _basis(t.heads.value[first])
            rows = t.rows[members].reshape(-1, E)
            fit = _fitted(torch.cat([value, context], dim=1), rows)
            on_value, on_context = fit.split([value.shape[1], size], dim=1)
            squares += on_context.mT @ on_context
            product += on_context.mT @ (rows - on_value @ value.mT)
        context = _basis(_solved(squares, product).mT)
        context = torch.nn.functional.pad(context, (0, size - context.shape[1]))
    left = torch.empty_like(t.rows)
    for first, members in groups:
        left[members] = _outside(t.rows[members], torch.cat([t.heads.value[first], context], dim=1))
    return left


def _fitted(space: Tensor, rows: Tensor) -> Tensor:
    """Coefficients (N, C) of rows (N, E) on the columns of `space` (E, C), by least squares."""
    return _solved(space.mT @ space, space.mT @ rows.mT).mT


def _solved(gram: Tensor, right: Tensor) -> Tensor:
    """gram^-1 right, for a Gram matrix that may be singular: a trace of it is added to its diagonal."""
    ridge = 1e-10 * gram.diagonal().mean().clamp(min=1e-300)
    solved: Tensor = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), right)
    return solved


def from_all_values_and_context(t: Target, size: int) -> Tensor:
    """What is left if keys are made from all values of the layer, kept, and a context of `size`."""
    rest = from_all_values(t)
    return _outside(rest, _leading(rest.reshape(-1, rest.shape[-1]), size))


def from_latent(t: Target, size: int) -> Tensor:
    """What is left if the keys of all heads are made from one latent of `size` (MLA, its key side alone)."""
    return _outside(t.rows, _leading(t.rows.reshape(-1, t.rows.shape[-1]), size))


def thin(t: Target, size: int) -> Tensor:
    """What is left of keys of width `size`, shared by the heads that share one now (thin keys)."""
    left = t.rows.clone()
    shared = t.heads.shared
    for first in sorted(set(shared)):
        members = [h for h, own in enumerate(shared) if own == first]
        rows = t.rows[members]
        if not t.rotated:
            left[members] = _outside(rows, _leading(rows.reshape(-1, rows.shape[-1]), size))
            continue
        sizes = torch.stack([(rows[:, pair] ** 2).sum() for pair in t.heads.pairs])
        kept = t.heads.pairs[sizes.argsort(descending=True)[: size // 2]].flatten().tolist()
        for h in members:
            left[h, kept] = 0
    return left


@dataclass(frozen=True, kw_only=True)
class Representation:
    """A way to make keys. cache: elements per token and layer that it would keep, values included.

    keeps_values: whether the model's own values are what keys are made from.
    """

    name: str
    cache: int
    keeps_values: bool
    left: Callable[[Target], Tensor]


def representations(heads: Heads, sizes: Sequence[int]) -> list[Representation]:
    """Those that say something about this layer. sizes: of contexts, latents and thin keys."""
    H, E, D = heads.query.shape
    keys, values = len(set(heads.shared)), _joined(heads.value).shape[1]
    found = [
        Representation(
            name="mqa keys" if g == 1 else f"gqa keys, {g} groups",
            cache=g * D + values,
            keeps_values=False,
            left=partial(shared_keys, groups=g),
        )
        for g in range(keys, 0, -1)
        if H % g == 0
    ]
    own = Representation(name="qv", cache=values, keeps_values=True, left=from_own_value)
    every = Representation(name="all values", cache=values, keeps_values=True, left=from_all_values)
    found += [own] if keys == 1 and len(set(_same(heads.value))) == 1 else [own, every]
    kinds: tuple[tuple[str, bool, Callable[..., Tensor], Callable[[int], int]], ...] = (
        ("qv-ka", True, from_value_and_context, lambda size: values + size),
        ("all values and context", True, from_all_values_and_context, lambda size: values + size),
        ("latent keys", False, from_latent, lambda size: values + size),
        ("thin keys", False, thin, lambda size: values + keys * size),
    )
    for name, keeps, left, cache in kinds:
        limit = D if left is thin else E
        found += [
            Representation(
                name=f"{name} {size}",
                cache=cache(size),
                keeps_values=keeps,
                left=partial(left, size=size),
            )
            for size in sizes
            if size < limit
        ]
    return found


def residuals(heads: Heads, sizes: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """Measure -> representation -> relative residual |M - M'| / |M| per head."""
    made = {OFFSET_0: target(heads, rotated=False)}
    if len(heads.pairs):
        made[EVERY_OFFSET] = target(heads, rotated=True)
    return {
        measure: {r.name: t.residuals(r.left(t)) for r in representations(heads, sizes)} for measure, t in made.items()
    }


# -- a whole model -----------------------------------------------------------------------------------------------


def measure(
    layers: Mapping[str, Sequence[Attention]],
    *,
    name: str,
    sizes: Sequence[int] | None = None,
    moments: Mapping[str, Sequence[Tensor]] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Everything about a model's heads in JSON's types.

    layers: attention layers by place.  sizes: of contexts, latents and thin keys; default: a quarter, a half, one and
    two head widths.  moments: by place and layer, second moment and mean of the layer's input (E, E + 1), as
    `second_moments` gives them; adds the measures weighed by activations.
    """
    found = []
    random: dict[str, dict[str, dict[str, list[float]]]] = {}
    for heads in _all_heads(layers):
        D = heads.query.shape[-1]
        chosen = sorted(set(sizes or (max(1, D // 4), max(1, D // 2), D, 2 * D)))
        own = residuals(heads, chosen)
        shape = str((heads.query.shape, heads.value.shape, heads.shared, _same(heads.value), heads.pairs.shape))
        random[shape] = random.get(shape) or residuals(heads.at_random(), chosen)
        if moments is not None and heads.place in moments:
            weighed = residuals(heads.weighed(moments[heads.place][heads.layer]), chosen)
            own |= {f"{key}, weighed": value for key, value in weighed.items()}
        found.append(
            {
                "place": heads.place,
                "layer": heads.layer,
                "d_model": heads.query.shape[1],
                "width": D,
                "shared": heads.shared,
                "ranks": ranks(heads),
                "angles": [vars(one) for one in angles(heads)],
                "residuals": own,
                "random": {key: {n: float(np.mean(v)) for n, v in one.items()} for key, one in random[shape].items()},
                "cache": {r.name: r.cache for r in representations(heads, chosen)},
                "keeps_values": {r.name: r.keeps_values for r in representations(heads, chosen)},
            }
        )
        progress(f"{heads.place} layer {heads.layer + 1}")
    return {"model": name, "layers": found, "summary": summary(found)}


def _all_heads(layers: Mapping[str, Sequence[Attention]]) -> Iterator[Heads]:
    for place, attentions in layers.items():
        for i, attention in enumerate(attentions):
            if not attention.borrows:
                yield heads_of(attention, place, i)


def summary(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per representation: over all heads of all layers that know it, the mean residual and the range, by measure."""
    names = dict.fromkeys(name for layer in layers for name in layer["cache"])
    found = []
    for name in names:
        own = [layer for layer in layers if name in layer["cache"]]
        by_measure = {}
        for measure_name in own[0]["residuals"]:
            values = np.concatenate([layer["residuals"][measure_name][name] for layer in own])
            by_measure[measure_name] = {
                "mean": float(values.mean()),
                "least": float(values.min()),
                "most": float(values.max()),
                "unexplained": float((values**2).mean()),
            }
        found.append(
            {
                "name": name,
                "cache": own[0]["cache"][name],
                "keeps_values": own[0]["keeps_values"][name],
                "random": {key: one[name] for key, one in own[0]["random"].items()},
                "heads": sum(len(layer["shared"]) for layer in own),
                "residual": by_measure,
            }
        )
    return found
