"""Attention said a second time, in plain Python loops over numbers. Slow, and independent of everything in `src`
but the fields of a request: no matrix product, no softmax function, no shared helper."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qvattn import Geometry, ScoreTerm, ValueTerm
from qvattn.positions import DistanceTables, Rotation


def turn(vector: list[float], position: int, rotation: Rotation) -> list[float]:
    """One vector turned by RoPE: every pair is a complex number, multiplied by exp(i * angle)."""
    width = len(vector)
    turning = rotation.dim or width
    span = width if rotation.proportional else turning
    out = list(vector)
    for pair in range(turning // 2):
        i, j = (pair, pair + span // 2) if rotation.layout == "half" else (2 * pair, 2 * pair + 1)
        angle = position * rotation.base ** (-2 * pair / span)
        z = complex(vector[i], vector[j]) * cmath.exp(1j * angle)
        out[i], out[j] = z.real, z.imag
    return out


def shared_head(h: int, n_heads: int, shared: int, groups: tuple[int, ...] | None) -> int:
    """The shared head that query head h reads."""
    if groups is None:
        return h // (n_heads // shared)
    seen = 0
    for g, size in enumerate(groups):
        seen += size
        if h < seen:
            return g
    raise AssertionError


def sees(q: int, k: int, geometry: Geometry) -> bool:
    if k < 0 or (geometry.causal and k > q):
        return False
    if geometry.window is None:
        return True
    return q - k < geometry.window and (geometry.causal or k - q < geometry.window)


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def attend_in_loops(
    scores: Sequence[ScoreTerm],
    value: ValueTerm,
    geometry: Geometry,
    *,
    scale: float,
    tables: DistanceTables | None = None,
) -> Tensor:
    """(B, H, M, D_out) in float64."""
    B, H, M, _ = scores[0].q.shape
    T = value.stream.shape[2]
    rows = []
    for b in range(B):
        q_pos = geometry.q_pos[b if geometry.q_pos.shape[0] > 1 else 0].tolist()
        k_pos = geometry.k_pos[b if geometry.k_pos.shape[0] > 1 else 0].tolist()
        for h in range(H):
            for m in range(M):
                weights: dict[int, float] = {}
                for n in range(T):
                    if not sees(q_pos[m], k_pos[n], geometry):
                        continue
                    s = scale * sum(_product(term, b, h, m, n, H, k_pos[n]) for term in scores)
                    delta = q_pos[m] - k_pos[n]
                    if tables is not None and tables.mul is not None:
                        s *= float(tables.mul[h, delta - tables.delta_min])
                    if tables is not None and tables.add is not None:
                        s += float(tables.add[h, delta - tables.delta_min])
                    weights[n] = s
                top = max(weights.values(), default=0.0)
                exponentials = {n: math.exp(s - top) for n, s in weights.items()}
                total = sum(exponentials.values())
                out = [0.0] * len(_value(value, b, h, 0, H))
                for n, e in exponentials.items():
                    a = e / total
                    if tables is not None and tables.value_mul is not None:
                        a *= float(tables.value_mul[h, q_pos[m] - k_pos[n] - tables.delta_min])
                    out = [o + a * v for o, v in zip(out, _value(value, b, h, n, H), strict=True)]
                if value.lift is not None:
                    columns = value.lift[h].T.tolist()
                    out = [dot(out, column) for column in columns]
                rows.append(out)
    return torch.tensor(rows, dtype=torch.float64).view(B, H, M, -1)


def _product(term: ScoreTerm, b: int, h: int, m: int, n: int, H: int, position: int) -> float:
    q = term.q[b, h, m].tolist()
    g = shared_head(h, H, term.stream.shape[1], term.groups)
    k = term.stream[b, g, n].tolist()[term.start : term.start + len(q)]
    if term.gain is not None:
        k = [x * y for x, y in zip(k, term.gain.tolist(), strict=True)]
    if term.rotation is not None:
        k = turn(k, position, term.rotation)
    return dot(q, k)


def _value(value: ValueTerm, b: int, h: int, n: int, H: int) -> list[float]:
    stop = None if value.width is None else value.start + value.width
    heads = value.stream.shape[1]
    if value.flat:
        return [x for g in range(heads) for x in value.stream[b, g, n].tolist()[value.start : stop]]
    v: list[float] = value.stream[b, shared_head(h, H, heads, value.groups), n].tolist()[value.start : stop]
    return v
