"""The algebra of each conversion: from the maps of a layer and the moments of its input to the new layer's weights.

Nothing here runs a model. A fit returns every parameter of the new variant but `q_proj` and `o_proj`, which it returns
only where they change; the caller loads them strictly, so nothing can be left at random.

    keys rebuilt from values   reduced-rank regression: K on V first, then G = the principal subspace of what is left
    latent (MLA)               the principal subspace of keys and values together
    thin keys                  the subspace of each key head that carries the scores
    fewer heads                means over the heads of a group (arXiv 2305.13245, section 2.1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...positions import POSITIONS
from ...positions.agf import AGF
from ...spec import AttentionSpec
from .maps import Maps, Moments, joined, principal, regress, roots

State = dict[str, Tensor]
TURNS = 40
"""Alternations between G and the factors where the heads' features differ."""


class Fitted(NamedTuple):
    """state: parameters by name.  keys, values: what the new layer has in their place, as maps like those of `Maps`."""

    state: State
    keys: Tensor
    values: Tensor


Fit = Callable[[Maps, AttentionSpec, Moments], Fitted]


def linear(name: str, mapped: Tensor, bias: bool) -> State:
    """Weight and bias of the linear layer that a map (E + 1, out) is."""
    state = {f"{name}.weight": mapped[:-1].T}
    return state | ({f"{name}.bias": mapped[-1]} if bias else {})


def keys_from_values(maps: Maps, spec: AttentionSpec, moments: Moments) -> Fitted:
    """K_h = [G; V] W_h + b: weighted least squares over the calibration text (`key_from` says which values).

    G are the principal components, in the metric of the keys, of what the values and the constant leave of all keys
    together: reduced-rank regression. Where all heads have the same values among their features this is the optimum;
    otherwise G and W_h are solved for in turn.
    """
    assert spec.d_ctx
    width, heads = maps.d_key, maps.k_heads
    fixed = [_features(maps, spec, head) for head in range(heads)]
    keys = [maps.k[:, h * width : (h + 1) * width] for h in range(heads)]
    half, _ = roots(moments.key_metric)
    alone = [f @ regress(moments, f, k) for k, f in zip(keys, fixed, strict=True)]
    for _ in range(TURNS if spec.key_from == "own" else 1):
        left = maps.k - joined(alone)
        turn = half @ principal(half @ moments.of(left) @ half, spec.d_ctx)
        g = left @ turn
        factors = [regress(moments, joined((g, f)), k) for k, f in zip(keys, fixed, strict=True)]
        alone = [f @ w[spec.d_ctx :] for w, f in zip(factors, fixed, strict=True)]
    if not spec.bias:
        g = torch.cat((g[:-1], torch.zeros_like(g[-1:])))
    factors = [regress(moments, joined((g, f)), k) for k, f in zip(keys, fixed, strict=True)]
    rebuilt = joined(joined((g, f)) @ w for w, f in zip(factors, fixed, strict=True))
    c, constant = spec.d_ctx, int(_has_constant(spec))
    state = linear("g_proj", g, spec.bias) | linear("v_proj", maps.v, spec.bias)
    state["context_to_key"] = torch.stack([w[:c] for w in factors])
    if spec.key_from != "context":
        state["value_to_key"] = torch.stack([w[c : len(w) - constant] for w in factors])
    if spec.key_bias:
        state["key_bias"] = torch.stack([w[-1] for w in factors])
    return Fitted(state, rebuilt, maps.v)


def _features(maps: Maps, spec: AttentionSpec, head: int) -> Tensor:
    """What a key head may be made from beside G: the values, and the constant, as a map (E + 1, n)."""
    d, per_value = maps.d_value, maps.k_heads // maps.v_heads if maps.k_heads >= maps.v_heads else 1
    own = maps.v[:, head // per_value * d : (head // per_value + 1) * d]
    values = {"own": own, "all": maps.v, "context": maps.v[:, :0]}[spec.key_from or "own"]
    return joined((values, maps.one())) if _has_constant(spec) else values


def _has_constant(spec: AttentionSpec) -> bool:
    """Whether a constant key is at hand: as a bias, or for nothing, where it shifts all scores of a query alike."""
    position = POSITIONS[spec.position.kind]
    shifts_alike = not position.rotary and not issubclass(position, AGF) and spec.qk_norm is None
    return bool(spec.key_bias) or shifts_alike


def latent(maps: Maps, spec: AttentionSpec, moments: Moments) -> Fitted:
    """K = c U_K, V = c U_V, c the principal components of [K; V] in the metric of both (joint SVD)."""
    assert spec.kv_rank
    both = joined((maps.k, maps.v))
    half, _ = roots(moments.metric)
    c = both @ half @ principal(half @ moments.of(both) @ half, spec.kv_rank)
    if not spec.bias:
        c = torch.cat((c[:-1], torch.zeros_like(c[-1:])))
    to_key, to_value = (regress(moments, c, target) for target in (maps.k, maps.v))
    state = linear("kv_down", c, spec.bias)
    for name, factor, count in (
        ("latent_to_key", to_key, maps.k_heads),
        ("latent_to_value", to_value, maps.v_heads),
    ):
        heads = factor.unflatten(1, (count, -1)).transpose(0, 1)
        state[name] = heads.repeat_interleave(spec.n_heads // count, dim=0)
    return Fitted(state, c @ to_key, c @ to_value)


def thin(maps: Maps, spec: AttentionSpec, moments: Moments) -> Fitted:
    """Per key head the d_key directions that carry most of what counts: the SVD of M^1/2 C^1/2. No rotation.

    q . k = (q M^-1/2 U) . (U^T M^1/2 k); the changed scale 1/sqrt(d_key) goes into the query.
    """
    assert spec.d_key
    wide, per_key = maps.d_key, spec.n_heads // maps.k_heads
    queries, keys, rebuilt = [], [], []
    for head in range(maps.k_heads):
        part = slice(head * wide, (head + 1) * wide)
        k = maps.k[:, part]
        half, inverse = roots(moments.key_metric[part, part])
        turn = principal(half @ moments.of(moments.centred(k)) @ half, spec.d_key)
        for i in range(head * per_key, (head + 1) * per_key):
            q = maps.q[:, i * wide : (i + 1) * wide]
            queries.append(q @ inverse @ turn * (spec.d_key / wide) ** 0.5)
        keys.append(k @ half @ turn)
        rebuilt.append(keys[-1] @ turn.T @ inverse)
    state = linear("q_proj", joined(queries), spec.bias) | linear("k_proj", joined(keys), spec.bias)
    return Fitted(state | linear("v_proj", maps.v, spec.bias), joined(rebuilt), maps.v)


def pooled(maps: Maps, spec: AttentionSpec, moments: Moments) -> Fitted:
    """Keys and values of a group of heads are replaced by their mean."""
    wanted_k, wanted_v = spec.variant_class.shared_heads(spec)  # type: ignore[attr-defined]

    def mean(mapped: Tensor, heads: int, wanted: int) -> Tensor:
        return mapped.unflatten(1, (wanted, heads // wanted, -1)).mean(2).flatten(1)

    k, v = mean(maps.k, maps.k_heads, wanted_k), mean(maps.v, maps.v_heads, wanted_v)
    state = linear("k_proj", k, spec.bias) | linear("v_proj", v, spec.bias)

    def spread(mapped: Tensor, heads: int, wanted: int) -> Tensor:
        return mapped.unflatten(1, (wanted, -1)).repeat_interleave(heads // wanted, dim=1).flatten(1)

    return Fitted(state, spread(k, maps.k_heads, wanted_k), spread(v, maps.v_heads, wanted_v))


def value_only(maps: Maps, spec: AttentionSpec, moments: Moments) -> Fitted:
    """Keys dropped: K_h is replaced by its regression on V_h, which moves into the query.

    With RoPE that regression must commute with the rotation: one complex factor per pair of elements.
    """
    width, per_key = maps.d_key, spec.n_heads // maps.k_heads
    queries, rebuilt = [], []
    for head in range(maps.k_heads):
        part = slice(head * width, (head + 1) * width)
        k, v = maps.k[:, part], maps.v[:, part]
        rotary = POSITIONS[spec.position.kind].rotary
        factor = _commuting(moments, v, k, spec) if rotary else regress(moments, v, k)
        queries += [
            maps.q[:, i * width : (i + 1) * width] @ factor.T for i in range(head * per_key, (head + 1) * per_key)
        ]
        rebuilt.append(v @ factor)
    state = linear("q_proj", joined(queries), spec.bias) | linear("v_proj", maps.v, spec.bias)
    return Fitted(state, joined(rebuilt), maps.v)


def _commuting(moments: Moments, v: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """B minimising E|k - v B|^2 among what commutes with RoPE: per turned pair a scaled rotation, the rest at will."""
    width = v.shape[1]
    turned = spec.position.dim or width
    pairs = torch.arange(turned)
    pairs = pairs.view(2, -1).T if spec.position.layout == "half" else pairs.view(-1, 2)
    cross, energy = moments.of(v, k), moments.of(v).diagonal()
    factor = torch.zeros(width, width, dtype=v.dtype)
    if turned < width:
        factor[turned:, turned:] = regress(moments, v[:, turned:], k[:, turned:])
    for a, b in pairs.tolist():
        total = energy[a] + energy[b]
        cosine, sine = (cross[a, a] + cross[b, b]) / total, (cross[a, b] - cross[b, a]) / total
        factor[a, a] = factor[b, b] = cosine
        factor[a, b], factor[b, a] = sine, -sine
    return factor


FITS: dict[str, Fit] = {
    "gqa": pooled,
    "mqa": pooled,
    "qv-ka": keys_from_values,
    "qv-ka-gqa": keys_from_values,
    "thin-key": thin,
    "mla": latent,
    "qv": value_only,
    "qv-gqa": value_only,
    "qv-mqa": value_only,
}
"""Variant -> how its weights follow. What is not here cannot be converted to."""
