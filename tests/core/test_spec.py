"""AttentionSpec: impossible combinations raise at construction with field, value and fix; counts are computed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from qvattn import Attention, AttentionSpec, PositionSpec, UserError, presets
from qvattn.positions import POSITIONS
from qvattn.variants import VARIANTS

from .tiny import tiny, tiny_spec, tokens

IMPOSSIBLE: list[tuple[dict[str, Any], str, str]] = [
    # names
    ({"variant": "mla2"}, "variant='mla2'", "allowed are mha, .*did you mean 'mla'"),
    ({"position": "rop"}, "position='rop'", "did you mean 'rope'"),
    ({"postion": "rope"}, "postion", "did you mean 'position'"),
    # widths and heads
    ({"d_model": 0}, "d_model=0", "greater than or equal to 1"),
    ({"n_heads": 0}, "n_heads=0", "greater than or equal to 1"),
    ({"n_heads": 5}, "n_heads=5", "does not divide d_model=16; set d_head or change one"),
    ({"d_head": -1}, "d_head=-1", "greater than or equal to 0"),
    ({"variant": "gqa", "k_heads": 3}, "k_heads=3", "does not divide n_heads=4; use a divisor, or .* groups"),
    ({"variant": "gqa", "v_heads": 8}, "v_heads=8", "does not divide n_heads=4; use a divisor"),
    ({"variant": "qv-gqa", "v_heads": 0}, "v_heads=0", "greater than or equal to 1"),
    # fields a variant does not use
    ({"variant": "mha", "k_heads": 2}, "k_heads=2", "'mha' does not use it .*leave it unset"),
    ({"variant": "mqa", "v_heads": 1}, "v_heads=1", "'mqa' does not use it .*leave it unset"),
    ({"variant": "qv", "d_key": 8}, "d_key=8", "'qv' does not use it .*leave it unset"),
    ({"variant": "qv-gqa", "k_heads": 2}, "k_heads=2", "it uses v_heads, groups.*leave it unset"),
    ({"variant": "qv", "d_ctx": 8}, "d_ctx=8", "leave it unset"),
    ({"variant": "mha", "kv_rank": 8}, "kv_rank=8", "leave it unset"),
    ({"variant": "gqa", "q_rank": 8}, "q_rank=8", "leave it unset"),
    ({"variant": "qv-mla", "rope_dim": 2}, "rope_dim=2", "leave it unset"),
    ({"variant": "qv-ka", "latent_norm": False}, "latent_norm=False", "leave it unset"),
    ({"variant": "qv", "groups": (2, 2)}, "groups=(2, 2)", "leave it unset"),
    # groups
    ({"variant": "gqa", "groups": (3, 2)}, "groups=[3, 2]", r"4 \(n_heads\) in total"),
    ({"variant": "gqa", "groups": (4, 0)}, "groups=[4, 0]", "at least one query head"),
    ({"variant": "qv-gqa", "groups": ()}, "groups=[]", "at least one query head"),
    ({"variant": "qv-gqa", "groups": (3, 1), "v_heads": 4}, "v_heads=4", r"groups=\[3, 1\] name 2 heads; leave"),
    # variants' own conditions
    ({"variant": "thin-key", "d_key": 4}, "d_key=4", "thinner than d_value=4; otherwise use gqa or mha"),
    ({"variant": "qv-ka", "d_ctx": 0}, "d_ctx=0", "greater than or equal to 1"),
    ({"variant": "qv-ka-gqa", "v_heads": 4, "k_heads": 2}, "k_heads=2", "use a multiple of v_heads=4"),
    (
        {"variant": "qv-ka-gqa", "n_heads": 8, "groups": (6, 2), "k_heads": 4},
        "k_heads=4",
        r"groups=\[6, 2\] use one rebuilt key per value head \(2\) or per query head \(8\)",
    ),
    ({"variant": "mla", "rope_dim": 2}, "rope_dim=2", "'none' rotates nothing; leave rope_dim unset or use .*'rope'"),
    ({"variant": "mla", "rope_dim": 2, "position": "alibi"}, "rope_dim=2", "'alibi' rotates nothing"),
    ({"variant": "mla", "kv_rank": 0}, "kv_rank=0", "greater than or equal to 1"),
    ({"variant": "gta", "rope_dim": 4}, "rope_dim=4", "allowed is 1 to 3"),
    ({"variant": "gta", "rope_dim": 0}, "rope_dim=0", "allowed is 1 to 3.*this is qv-gqa"),
    ({"variant": "slim", "d_head": 8}, "d_head=8", "W_K must be square.*leave d_head unset or use mha"),
    ({"variant": "slim", "bias": True}, "bias=True", "use bias=False or mha"),
    ({"variant": "slim", "d_value": 8}, "d_value=8", "leave it unset"),
    # rotation
    ({"position": "rope", "d_head": 3}, "position.dim=3", "turns pairs; give an even number up to .*width 3"),
    ({"position": {"kind": "rope", "dim": 3}}, "position.dim=3", "turns pairs; give an even number"),
    ({"position": {"kind": "rope", "dim": 6}}, "position.dim=6", "even number up to the rotated width 4"),
    (
        {"variant": "mla", "rope_dim": 2, "position": {"kind": "rope", "dim": 4}},
        "position.dim=4",
        "up to the rotated width 2",
    ),
    ({"variant": "gta", "rope_dim": 3, "position": "rope"}, "position.dim=3", "turns pairs"),
    ({"variant": "mla", "rope_dim": 3, "position": "rope"}, "position.dim=3", "turns pairs"),
    # options of position schemes
    ({"position": {"kind": "rope", "base": 1.0}}, "position.base=1.0", "allowed is base > 1"),
    ({"position": {"kind": "rope", "layout": "pairs"}}, "layout='pairs'", "'half' or 'interleaved'"),
    ({"position": {"kind": "rope", "proportional": True}}, "position.proportional=True", "set position.dim"),
    ({"position": {"kind": "alibi", "base": 2.0}}, "position.base=2.0", "'alibi' has no such option; leave it unset"),
    ({"position": {"kind": "none", "tau": 1.0}}, "position.tau=1.0", "'none' has no such option"),
    ({"position": {"kind": "t5", "buckets": 7}}, "position.buckets=7", "give an even number"),
    ({"position": {"kind": "t5", "buckets": 2}}, "buckets=2", "greater than or equal to 4"),
    ({"position": {"kind": "t5", "max_distance": 16}}, "position.max_distance=16", "give more than 16"),
    ({"position": {"kind": "learned", "max_length": 0}}, "max_length=0", "greater than or equal to 1"),
    ({"position": {"kind": "agf", "tau": 0.0}}, "position.tau=0.0", "allowed are positive distances"),
    ({"position": {"kind": "agf", "floor": 1.0}}, "position.floor=1.0", "allowed is 0 <= floor < 1"),
    ({"position": {"kind": "agf", "flattest": 2.0}}, "position.flattest=2.0", "allowed is 0 < flattest <= steepest"),
    ({"position": {"kind": "agf+pcm-v", "flattest": 0.0}}, "position.flattest=0.0", "allowed is 0 < flattest"),
    # the rest
    ({"window": 0}, "window=0", "greater than or equal to 1"),
    ({"dropout": 1.0}, "dropout=1.0", "less than 1"),
    ({"dropout": -0.1}, "dropout=-0.1", "greater than or equal to 0"),
]


@pytest.mark.parametrize(("fields", "culprit", "fix"), IMPOSSIBLE, ids=lambda v: v if isinstance(v, str) else None)
def test_impossible_combinations_name_field_value_and_fix(fields: dict[str, Any], culprit: str, fix: str) -> None:
    with pytest.raises(UserError) as refusal:
        AttentionSpec(**{"variant": "mha", "d_model": 16, "n_heads": 4} | fields)
    assert culprit in str(refusal.value)
    assert re.search(fix, str(refusal.value)), str(refusal.value)


ROUTES = [(variant, "rope", {}) for variant in ("qv-ka", "qv-ka-gqa", "qv-mla", "mla-wide-k")]


@pytest.mark.parametrize(("variant", "position", "fields"), [*ROUTES, ("mla", "rope", {"rope_dim": 0})])
def test_absorption_under_rotation_is_refused(variant: str, position: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"route='absorb'.*position 'rope' rotates keys.*use route='expand'"):
        Attention(tiny_spec(variant, position, **fields), route="absorb")


def test_misuse_of_a_layer_is_refused() -> None:
    layer, x = tiny(tiny_spec("mha")), tokens(2, 3)
    for call, message in (
        (lambda: layer(x[0]), r"x has shape \(3, 16\), expected \[B, M, E=16\]"),
        (lambda: layer(x[..., :8]), r"x has shape \(2, 3, 8\), expected \[B, M, E=16\]"),
        (lambda: layer(x, memory=x, cache=layer.new_cache(2)), "cache: .*memory_streams"),
        (lambda: layer(x, cache=layer.new_cache(3)), "x has 2 rows, the cache has 3"),
        (lambda: tiny(tiny_spec("mha"), borrows=True)(x), "lent: a layer that borrows streams needs them"),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_specs_are_frozen_and_replaced_with_checks() -> None:
    spec = tiny_spec("gqa", v_heads=2)
    with pytest.raises(Exception, match="frozen"):
        spec.window = 3  # type: ignore[misc]
    assert spec.replace(window=3).window == 3 and spec.replace(window=3).v_heads == 2
    assert spec.replace(n_heads=8).d_head == 2  # what was not given follows anew
    with pytest.raises(UserError, match="v_heads=2 does not divide n_heads=3"):
        spec.replace(n_heads=3, d_head=4)
    assert AttentionSpec(variant="qkv", d_model=16, n_heads=4).variant == "mha"
    assert AttentionSpec(**spec.model_dump(exclude_defaults=True)) == spec
    assert hash(spec) == hash(tiny_spec("gqa", v_heads=2))


def test_design_table_of_cache_elements() -> None:
    """The last column of DESIGN 2.1, at H = 8, d = 64, g = 2."""
    H, d, g, r, r_q, p, c = 8, 64, 2, 128, 192, 32, 96
    rope = {"position": "rope"}
    expected: dict[str, tuple[dict[str, Any], int]] = {
        "mha": ({}, 2 * H * d),
        "gqa": ({"k_heads": g, "v_heads": g}, 2 * g * d),
        "mqa": ({}, 2 * d),
        "mla": ({"kv_rank": r, "rope_dim": p} | rope, r + p),
        "qv": ({}, H * d),
        "qv-gqa": ({"v_heads": g}, g * d),
        "qv-mqa": ({}, d),
        "qv-mla": ({"kv_rank": r}, r),
        "qv-ka": ({"d_ctx": c}, H * d + c),
        "qv-ka-gqa": ({"v_heads": g, "d_ctx": c}, g * d + c),
        "shared-v": ({"v_heads": g}, (H + g) * d),
        "mla-wide-k": ({"kv_rank": r, "q_rank": r_q}, r + r_q),
        "thin-key": ({"k_heads": g, "v_heads": g, "d_key": 16}, g * (16 + d)),
        "keyless": ({}, H * d),
        "k-eq-v": ({"v_heads": g}, g * d),
        "gta": ({"v_heads": g, "rope_dim": p} | rope, g * d + p),
        "slim": ({}, H * d),
    }
    for variant, (fields, elements) in expected.items():
        spec = AttentionSpec(variant=variant, d_model=H * d, n_heads=H, **fields)
        assert spec.cache_elements_per_token == elements, variant
        assert spec.cache_bytes_per_token(torch.bfloat16) == 2 * elements
    assert AttentionSpec(variant="qv-ka", d_model=512, n_heads=8).cache_elements_per_token == 640  # DESIGN 7


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 10, 12, 14, 32])
def test_every_variant_has_defaults_at_any_head_count(heads: int) -> None:
    for position in POSITIONS:
        specs = presets(8 * heads, heads, position=position)
        assert list(specs) == list(VARIANTS)
    assert tiny(specs["gqa"])(tokens(1, 2, width=8 * heads)).shape == (1, 2, 8 * heads)


def test_shared_heads_go_to_the_variants_that_share() -> None:
    specs = presets(64, 8, kv_heads=2)
    assert {n for n, s in specs.items() if s.v_heads == 2} == {
        "gqa", "qv-gqa", "qv-ka-gqa", "shared-v", "thin-key", "k-eq-v", "gta",
    }  # fmt: skip
    assert specs["thin-key"].k_heads == 2 and specs["mha"].v_heads is None


def test_flops_by_hand() -> None:
    """2 x multiply-adds, for MHA, for MLA absorbed, and for keys that must be rebuilt at every step."""
    E, H, d, r, n = 16, 4, 4, 8, 100
    mha = AttentionSpec(variant="mha", d_model=E, n_heads=H)
    assert mha.projection_flops_per_token == 2 * 4 * E * E
    assert mha.attention_flops_per_token(n) == 2 * 2 * H * d * n
    assert mha.bytes_read_per_token(n, torch.float16) == 2 * 2 * H * d * n
    mla = AttentionSpec(variant="mla", d_model=E, n_heads=H, kv_rank=r)
    fold_and_lift = 2 * H * d * r
    assert mla.projection_flops_per_token == 2 * (2 * E * E + E * r + fold_and_lift)
    assert mla.attention_flops_per_token(n) == 2 * 2 * H * r * n
    rebuilt = AttentionSpec(variant="qv-mla", d_model=E, n_heads=H, kv_rank=r, position="rope")
    assert rebuilt.attention_flops_per_token(n) == 2 * (2 * H * d * n + H * r * d * n)
    keyless = AttentionSpec(variant="keyless", d_model=E, n_heads=H)
    assert keyless.projection_flops_per_token == 2 * 3 * E * E  # its factor is folded away
    windowed = mha.replace(window=10)
    assert windowed.attention_flops_per_token(n) == mha.attention_flops_per_token(10)
    assert windowed.bytes_read_per_token(n) == mha.bytes_read_per_token(10)
    with pytest.raises(UserError, match="context=-1"):
        mha.attention_flops_per_token(-1)


def test_position_spec_by_itself() -> None:
    assert PositionSpec(kind="rope").options == {
        "base": 10_000.0,
        "dim": None,
        "layout": "half",
        "proportional": False,
        "frequencies": None,
        "gain": 1.0,
    }
    with pytest.raises(UserError, match=r"position.frequencies: 3 of them for a rotated width of 4"):
        AttentionSpec(d_model=16, n_heads=4, position={"kind": "rope", "frequencies": (1.0, 0.5, 0.25)})
    assert AttentionSpec(d_model=16, n_heads=4, position={"kind": "t5", "buckets": 8}).position.buckets == 8
    assert str(PositionSpec(kind="agf+pcm-v")) == "agf+pcm-v"
