"""Where a conversion can be exact it is: logits equal those of the model it came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qvattn import UserError
from qvattn.hf.convert import Target, convert_layers
from qvattn.hf.convert.run import assembled
from qvattn.hf.convert.specs import target_specs
from qvattn.hf.convert.weighing import by_activations
from qvattn.models import CausalLM

from .small import layers, make_keys_from, model, windows


def converted(made: CausalLM, **target: Any) -> tuple[CausalLM, list[Any]]:
    specs = target_specs(made, Target(**target))
    residuals = convert_layers(made, specs, windows(), by_activations(made, windows()))
    return assembled(made, specs).eval(), residuals


def same_logits(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def logits(made: CausalLM) -> torch.Tensor:
    return made(input_ids=windows(3, 20, seed=8)).logits


BIASED = {"bias": True}
QWEN3 = {"qk_norm": 1e-6}


@pytest.mark.parametrize("source", ["all", "context"])
@pytest.mark.parametrize("attention", [{}, BIASED, QWEN3], ids=["plain", "bias", "norms of heads"])
@pytest.mark.parametrize("position", ["rope", "none", {"kind": "rope", "dim": 2}])
def test_keys_of_low_rank_beside_values_come_back_exactly(source: str, attention: Any, position: Any) -> None:
    made = model(attention=attention, position=position)
    make_keys_from(made, 3, source)
    before = logits(made)
    new, residuals = converted(made, variant="qv-ka-gqa", g_width=3, key_from=source)
    same_logits(logits(new), before)
    assert max(r.keys for r in residuals) < 1e-5


def test_a_missing_direction_shows_in_residual_and_logits() -> None:
    made = model()
    make_keys_from(made, 3, "all")
    before = logits(made)
    new, residuals = converted(made, variant="qv-ka-gqa", g_width=2, key_from="all")
    assert (logits(new) - before).abs().max() > 1e-3
    assert all(r.keys > 1e-3 for r in residuals)


def test_all_values_leave_less_than_own_and_own_less_than_none() -> None:
    left = {}
    for source in ("all", "own", "context"):
        _, residuals = converted(model(), variant="qv-ka-gqa", g_width=3, key_from=source)
        left[source] = residuals[0].keys
    assert left["all"] < left["own"] < left["context"]


def test_the_context_is_optimal() -> None:
    """No random G of the same width, with its own regression, leaves less (Eckart and Young)."""
    made = model()
    _, residuals = converted(made, variant="qv-ka-gqa", g_width=3, key_from="all")
    from qvattn.hf.convert.layers import HiddenStates
    from qvattn.hf.convert.maps import Maps, joined, regress

    original = model()
    block = next(original.decoder_stack.blocks())
    with torch.no_grad():
        moments = HiddenStates(original, windows()).moments(block, by_activations(original, windows())[0])
    maps = Maps.of(layers(original)[0])
    generator = torch.Generator().manual_seed(0)
    best = torch.inf
    for _ in range(50):
        g = torch.randn(17, 3, generator=generator, dtype=torch.float64)
        features = joined((g, maps.v, maps.one()))
        left = maps.k - features @ regress(moments, features, maps.k)
        best = min(best, moments.energy(left) / moments.energy(moments.centred(maps.k)))
    assert residuals[0].keys < best


def test_mha_converts_to_qv_ka_with_one_value_head_a_query() -> None:
    made = model(attention={"variant": "mha", "k_heads": None, "v_heads": None})
    make_keys_from(made, 2, "all")
    before = logits(made)
    new, _ = converted(made, variant="qv-ka", g_width=2)
    assert new.decoder_stack.specs[0].variant == "qv-ka"
    same_logits(logits(new), before)


@pytest.mark.parametrize("attention", [{}, BIASED], ids=["plain", "bias"])
@pytest.mark.parametrize("position", ["rope", "none"])
def test_mla_of_the_full_joint_rank_is_exact(attention: Any, position: str) -> None:
    made = model(attention=attention, position=position)
    make_keys_from(made, 3, "all")  # keys and values together: rank 11 of 16
    before = logits(made)
    rank = 12 if attention else 11
    new, residuals = converted(made, variant="mla", kv_rank=rank)
    same_logits(logits(new), before)
    assert max(max(r.keys, r.values) for r in residuals) < 1e-6


@pytest.mark.parametrize("attention", [{}, BIASED], ids=["plain", "bias"])
def test_thin_keys_of_low_rank_are_exact(attention: Any) -> None:
    made = model(position="none", attention=attention)
    with torch.no_grad():
        for variant in layers(made):  # the last two elements of every key head repeat the first two
            for linear in (variant.k_proj.weight, *([variant.k_proj.bias] if attention else [])):
                heads = linear.view(2, 4, -1)
                heads[:, 2:] = heads[:, :2]
    before = logits(made)
    new, _ = converted(made, variant="thin-key", d_key=2)
    assert new.decoder_stack.specs[0].d_key == 2
    same_logits(logits(new), before)


def test_thin_keys_of_rotated_models_are_one_for_all_heads() -> None:
    made = model()
    make_keys_from(made, 3, "context")
    before = logits(made)
    new, _ = converted(made, variant="thin-key", g_width=3)
    assert [str(s) for s in new.decoder_stack.specs[0].streams] == ["v (2x4, V)", "g (1x3, S)"]
    same_logits(logits(new), before)


@pytest.mark.parametrize("attention", [{}, BIASED, QWEN3], ids=["plain", "bias", "norms of heads"])
@pytest.mark.parametrize(("to", "heads"), [("gqa", 2), ("mqa", 1)])
def test_pooling_heads_that_are_equal_changes_nothing(attention: Any, to: str, heads: int) -> None:
    """CASES 12: heads duplicated within groups, MHA -> GQA."""
    made = model(attention={"variant": "mha", "k_heads": None, "v_heads": None} | attention)
    with torch.no_grad():
        for variant in layers(made):
            for linear in (variant.k_proj, variant.v_proj):
                for p in linear.parameters():
                    grouped = p.view(heads, 4 // heads, -1)
                    grouped[:] = grouped[:, :1].clone()
    before = logits(made)
    new, _ = converted(made, variant=to, kv_heads=heads if to == "gqa" else None)
    assert new.decoder_stack.specs[0].cache_elements_per_token == 2 * 4 * heads
    same_logits(logits(new), before)


@pytest.mark.parametrize("position", ["none", "rope", {"kind": "rope", "layout": "interleaved"}])
def test_keys_that_are_turned_values_can_be_dropped(position: Any) -> None:
    made = model(position=position)
    interleaved = isinstance(position, dict)
    with torch.no_grad():
        for variant in layers(made):
            v = variant.v_proj.weight.view(2, 4, -1)
            k = variant.k_proj.weight.view(2, 4, -1)
            for a, b in ((0, 1), (2, 3)) if interleaved else ((0, 2), (1, 3)):
                k[:, a], k[:, b] = 0.6 * v[:, a] - 0.8 * v[:, b], 0.8 * v[:, a] + 0.6 * v[:, b]
    before = logits(made)
    new, _ = converted(made, variant="qv-gqa")
    same_logits(logits(new), before)


def test_layers_are_fitted_on_converted_ones() -> None:
    """The second layer's regression sees the first one's error: it differs from a fit on the original's activations."""
    first, second = model(), model()
    weighings = by_activations(second, windows())
    specs = target_specs(first, Target(variant="qv-ka-gqa", g_width=1))
    convert_layers(first, specs, windows(), by_activations(first, windows()))
    from qvattn.hf.convert.layers import HiddenStates, fitted

    with torch.no_grad():
        hidden = HiddenStates(second, windows())
        blocks = list(second.decoder_stack.blocks())
        hidden.advance(blocks[0])
        alone, _ = fitted(blocks[1], specs[1], hidden.moments(blocks[1], weighings[1]))
    mine = list(first.decoder_stack.blocks())[1].self_attn.variant.value_to_key
    assert (mine - alone.variant.value_to_key).abs().max() > 1e-4


REFUSED = {
    "unknown variant": ({"variant": "qvka"}, r"--to qvka.*allowed are gqa"),
    "a variant without a conversion": ({"variant": "slim"}, r"--to slim: this variant has no conversion"),
    "too wide": ({"variant": "qv-ka-gqa", "g_width": 8}, r"--g-width 8.*1 to 7"),
    "latent too wide": ({"variant": "mla", "kv_rank": 16}, r"--rank 16"),
    "an option of another variant": ({"variant": "mla", "g_width": 2}, r"--g-width 2.*it uses --rank"),
    "heads that do not divide": ({"variant": "gqa", "kv_heads": 3}, r"--kv-heads 3: allowed are 1"),
    "shared heads to qv-ka": ({"variant": "qv-ka"}, r"use --to qv-ka-gqa"),
    "thin heads that rotate": ({"variant": "thin-key", "d_key": 2}, r"--key-width 2.*--g-width"),
    "shared heads to qv": ({"variant": "qv"}, r"use --to qv-gqa"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_the_name_of_the_option(case: str) -> None:
    target, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        target_specs(model(), Target(**target))


def test_norms_of_heads_are_refused_where_keys_come_from_a_latent() -> None:
    for variant in ("mla", "qv-gqa"):
        with pytest.raises(UserError, match="qk_norm"):
            target_specs(model(attention=QWEN3), Target(variant=variant))
    with pytest.raises(UserError, match="give it the original"):
        target_specs(model(attention={"variant": "qv-gqa", "k_heads": None}), Target(variant="qv-ka-gqa"))
