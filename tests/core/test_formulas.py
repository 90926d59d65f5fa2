"""Each variant against its formula, written a second time from the raw parameters: what q, k and v of one query head
are. Nothing of `src` computes anything here but the layer under test."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qvattn import AttentionSpec
from qvattn.variants import VARIANTS

from .loops import turn as turn_one
from .tiny import close, tiny, tiny_spec, tokens

Turn = Callable[[Tensor], Tensor]
P = dict[str, Tensor]
Formula = Callable[[P, AttentionSpec, Tensor, Turn, int], tuple[Tensor, Tensor, Tensor]]
"""(parameters, spec, x (T, E), RoPE of (T, D), query head) -> q (T, D), k (T, D), v (T, Dv) as they meet."""


def project(p: P, name: str, x: Tensor) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def head(y: Tensor, h: int, width: int) -> Tensor:
    return y[:, h * width : (h + 1) * width]


def reads(h: int, shared: int, spec: AttentionSpec) -> int:
    """The shared head of query head h: by the named groups, else evenly and in order (Llama)."""
    if spec.groups is not None and len(spec.groups) == shared:
        return next(g for g in range(shared) if h < sum(spec.groups[: g + 1]))
    return h * shared // spec.n_heads


def rms(y: Tensor) -> Tensor:
    return y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def separate(k_heads: str | int, v_heads: str | int) -> Formula:
    def formula(p: P, spec: AttentionSpec, x: Tensor, turn: Turn, h: int) -> tuple[Tensor, Tensor, Tensor]:
        ks = getattr(spec, k_heads) if isinstance(k_heads, str) else k_heads
        vs = getattr(spec, v_heads) if isinstance(v_heads, str) else v_heads
        q = head(project(p, "q_proj", x), h, spec.d_key)
        k = head(project(p, "k_proj", x), reads(h, ks, spec), spec.d_key)
        v = head(project(p, "v_proj", x), reads(h, vs, spec), spec.d_value)
        return turn(q), turn(k), v

    return formula


def value_only(v_heads: str | int) -> Formula:
    def formula(p: P, spec: AttentionSpec, x: Tensor, turn: Turn, h: int) -> tuple[Tensor, Tensor, Tensor]:
        vs = getattr(spec, v_heads) if isinstance(v_heads, str) else v_heads
        v = head(project(p, "v_proj", x), reads(h, vs, spec), spec.d_head)
        return turn(head(project(p, "q_proj", x), h, spec.d_head)), turn(v), v

    return formula


def value_and_context(p: P, spec: AttentionSpec, x: Tensor, turn: Turn, h: int) -> tuple[Tensor, Tensor, Tensor]:
    vs, ks = spec.v_heads or spec.n_heads, spec.k_heads or spec.n_heads
    v = head(project(p, "v_proj", x), reads(h, vs, spec), spec.d_head)
    factor = reads(h, ks, spec)
    k = project(p, "g_proj", x) @ p["context_to_key"][factor]  # K = [G; V] [W_G; W_V], V of the own head, all or none
    if spec.key_from != "context":
        k = k + (v if spec.key_from == "own" else project(p, "v_proj", x)) @ p["value_to_key"][factor]
    if spec.key_bias:
        k = k + p["key_bias"][factor]
    return turn(head(project(p, "q_proj", x), h, spec.d_key)), turn(k), v


def low_rank_query(p: P, spec: AttentionSpec, x: Tensor, h: int, width: int) -> Tensor:
    if spec.q_rank:
        x = latent(p, spec, "q_down", "q_norm", x)
    return head(project(p, "q_proj", x), h, width)


def latent(p: P, spec: AttentionSpec, down: str, norm: str, x: Tensor) -> Tensor:
    y = project(p, down, x)
    return rms(y) * p[f"{norm}.weight"] if spec.latent_norm else y


def mla(p: P, spec: AttentionSpec, x: Tensor, turn: Turn, h: int) -> tuple[Tensor, Tensor, Tensor]:
    rope = spec.rope_dim
    q = low_rank_query(p, spec, x, h, spec.d_key + rope)
    c = latent(p, spec, "kv_down", "kv_norm", x)
    k, v = c @ p["latent_to_key"][h], c @ p["latent_to_value"][h]
    if not rope:
        return turn(q), turn(k), v
    k_rope = turn(project(p, "k_rope_proj", x))
    return torch.cat((q[:, : spec.d_key], turn(q[:, spec.d_key :])), -1), torch.cat((k, k_rope), -1), v


def qv_mla(p: P, spec: AttentionSpec, x: Tensor, turn: Turn, h: int) -> tuple[Tensor, Tensor, Tensor]:
    v = latent(p, spec, "kv_down", "kv_norm", x) @ p["latent_to_value"][h]
    return turn(low_rank_query(p, spec, x, h, spec.d_head)), turn(v), v


def mla_wide_k(p: P, spec: AttentionSpec, x: Tensor, turn: Turn, h: int) -> tuple[Tensor, Tensor, Tensor]:
    k = latent(p, spec, "k_down", "k_norm", x) @ p["latent_to_key"][h]
    v = latent(p, spec, "v_down", "v_norm", x) @ p["latent_to_value"][h]
    return turn(low_rank_query(p, spec, x, h, spec.d_key)), turn(k), v


def keyless(p: P, spec: AttentionSpec, x: Tensor, turn: Turn, h: int) -> tuple[Tensor, Tensor, Tensor]:
    v = head(project(p, "v_proj", x), h, spec.d_head)
    q = head(project(p, "q_proj", x), h, spec.d_head)
    return turn(q @ p["query_to_value"][h]), turn(v), v


def k_eq_v(p: P, spec: AttentionSpec, x: Tensor, turn: Turn, h: int) -> tuple[Tensor, Tensor, Tensor]:
    v = rms(head(project(p, "v_proj", x), reads(h, spec.v_heads, spec), spec.d_head))
    q = rms(head(project(p, "q_proj", x), h, spec.d_head)) * p["q_gain"]
    return turn(q), turn(v * p["k_gain"]), v


def gta(p: P, spec: AttentionSpec, x: Tensor, turn: Turn, h: int) -> tuple[Tensor, Tensor, Tensor]:
    plain = spec.d_head - spec.rope_dim
    q = head(project(p, "q_proj", x), h, spec.d_head)
    tied = head(project(p, "v_proj", x), reads(h, spec.v_heads, spec), spec.d_head)
    k_rope = turn(project(p, "k_rope_proj", x))
    return torch.cat((q[:, :plain], turn(q[:, plain:])), -1), torch.cat((tied[:, :plain], k_rope), -1), tied


FORMULAS: dict[str, Formula] = {
    "mha": separate("n_heads", "n_heads"),
    "gqa": separate("k_heads", "v_heads"),
    "mqa": separate(1, 1),
    "mla": mla,
    "qv": value_only("n_heads"),
    "qv-gqa": value_only("v_heads"),
    "qv-mqa": value_only(1),
    "qv-mla": qv_mla,
    "qv-ka": value_and_context,
    "qv-ka-gqa": value_and_context,
    "shared-v": separate("n_heads", "v_heads"),
    "mla-wide-k": mla_wide_k,
    "thin-key": separate("k_heads", "v_heads"),
    "keyless": keyless,
    "k-eq-v": k_eq_v,
    "gta": gta,
}

SIX = {"n_heads": 6, "d_head": 4, "groups": (4, 2)}
MORE_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("mha", {"d_key": 6, "d_value": 2}),
    ("mha", {"bias": True, "d_head": 6}),
    ("gqa", {"k_heads": 2, "v_heads": 1}),
    ("gqa", {"k_heads": 1, "v_heads": 4, "d_key": 8, "d_value": 3}),
    ("gqa", {"n_heads": 12, "d_head": 4, "k_heads": 6, "v_heads": 2}),
    ("gqa", SIX),
    ("gqa", SIX | {"k_heads": 3}),
    ("mqa", {"d_key": 2, "d_value": 6}),
    ("mla", {"q_rank": 5, "kv_rank": 7, "d_key": 6, "d_value": 3}),
    ("mla", {"q_rank": 5, "latent_norm": False}),
    ("qv", {"d_head": 6, "bias": True}),
    ("qv-gqa", {"v_heads": 2}),
    ("qv-gqa", SIX),
    ("qv-mla", {"q_rank": 6, "kv_rank": 5, "bias": True}),
    ("qv-mla", {"latent_norm": False}),
    ("qv-ka", {"d_ctx": 3, "d_key": 6}),
    ("qv-ka-gqa", {"v_heads": 2}),
    ("qv-ka-gqa", {"v_heads": 2, "k_heads": 4, "d_key": 2, "bias": True}),
    ("qv-ka-gqa", SIX),
    ("qv-ka-gqa", SIX | {"k_heads": 6}),
    ("qv-ka-gqa", {"v_heads": 2, "key_from": "all", "bias": True}),
    ("qv-ka-gqa", {"v_heads": 2, "k_heads": 4, "key_from": "all", "d_key": 2}),
    ("qv-ka-gqa", SIX | {"key_from": "all"}),
    ("qv-ka-gqa", {"v_heads": 2, "k_heads": 1, "key_from": "context"}),
    ("qv-ka", {"key_from": "all"}),
    ("shared-v", {"v_heads": 2, "d_key": 6, "d_value": 5}),
    ("shared-v", SIX),
    ("mla-wide-k", {"q_rank": 6, "kv_rank": 3, "d_key": 6, "d_value": 2}),
    ("mla-wide-k", {"latent_norm": False}),
    ("thin-key", {"k_heads": 2, "v_heads": 1, "d_key": 2}),
    ("thin-key", SIX),
    ("keyless", {"d_head": 6, "bias": True}),
    ("k-eq-v", {"v_heads": 2, "bias": True}),
    ("k-eq-v", SIX),
    ("gta", {"v_heads": 2, "d_head": 6, "rope_dim": 4}),
    ("gta", SIX),
]
ALL = [(variant, {}) for variant in FORMULAS if variant in VARIANTS] + MORE_FIELDS
ROTATIONS: dict[str, Any] = {
    "none": "none",
    "rope": "rope",
    "rope-part": {"kind": "rope", "dim": 2, "layout": "interleaved", "base": 100.0},
}


def by_formula(spec: AttentionSpec, p: P, x: Tensor, position: Any) -> Tensor:
    """(T, E), causal, head by head and token by token."""

    def turn(y: Tensor) -> Tensor:
        rotation = position(torch.zeros(1))
        if rotation is None:
            return y
        return torch.tensor([turn_one(row.tolist(), t, rotation) for t, row in enumerate(y)], dtype=y.dtype)

    outputs = []
    for h in range(spec.n_heads):
        q, k, v = FORMULAS[spec.variant](p, spec, x, turn, h)
        rows = []
        for m in range(x.shape[0]):
            s = (k[: m + 1] @ q[m]) / math.sqrt(q.shape[1])
            a = (s - s.max()).exp()
            rows.append((a / a.sum()) @ v[: m + 1])
        outputs.append(torch.stack(rows))
    return project(p, "o_proj", torch.cat(outputs, dim=-1))


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize(("variant", "fields"), ALL, ids=lambda v: v if isinstance(v, str) else str(v))
def test_layer_is_its_formula(variant: str, fields: dict[str, Any], rotation: str) -> None:
    spec = tiny_spec(variant, ROTATIONS[rotation], **fields)
    x = tokens(1, 5)
    for route in ("expand", "absorb") if spec.can_absorb else ("expand",):
        layer = tiny(spec, route=route)
        p = {name: value.detach().double() for name, value in layer.variant.state_dict().items()}
        with torch.no_grad():
            expected = by_formula(spec, p, x[0].double(), layer.position.rotation)
            close(layer(x)[0].double(), expected)
        close(layer(x)[0].double(), expected)


@pytest.mark.parametrize("source", ["own", "all", "context"])
def test_a_constant_key_is_rotated_with_the_rest(source: str) -> None:
    fields = {"v_heads": 2, "key_from": source, "key_bias": True, "bias": True}
    test_layer_is_its_formula("qv-ka-gqa", fields, "rope")
    with_bias, without = tiny(tiny_spec("qv-ka-gqa", "rope", **fields)), tiny_spec("qv-ka-gqa", "rope", **fields)
    with torch.no_grad():
        with_bias.variant.key_bias.zero_()
        x = tokens(1, 5)
        assert (with_bias(x) - tiny(without)(x)).abs().max() > 1e-3


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_slim_is_mha_with_the_same_parameters(rotation: str) -> None:
    mha, slim = tiny(tiny_spec("mha", ROTATIONS[rotation])), tiny(tiny_spec("slim", ROTATIONS[rotation]))
    slim.load_state_dict(mha.state_dict())
    x = tokens(2, 6)
    close(slim(x), mha(x))
    with torch.no_grad():
        close(slim(x), mha(x))
    slim.route = "absorb"
    close(slim(x), mha(x))
    assert slim.spec.cache_elements_per_token * 2 == mha.spec.cache_elements_per_token


def test_mla_without_a_rotary_part_rotates_rebuilt_keys() -> None:
    spec = tiny_spec("mla", "rope", rope_dim=0)
    assert not spec.can_absorb and [s.name for s in spec.streams] == ["latent"]
    layer, x = tiny(spec), tokens(1, 5)
    p = {name: value.detach().double() for name, value in layer.variant.state_dict().items()}
    close(layer(x)[0].double(), by_formula(spec, p, x[0].double(), layer.position.rotation))


def test_mla_scale_is_of_the_key_width() -> None:
    """Never of the latent's (CASES 7)."""
    spec = tiny_spec("mla", "rope", d_key=4, rope_dim=2, kv_rank=8)
    assert tiny(spec).variant.scale == pytest.approx(1 / math.sqrt(6))
