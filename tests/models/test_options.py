"""Options that imported models need, in every variant that takes them: cached equals full, lean equals generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qvattn import Attention, AttentionSpec, UserError
from qvattn.decode import greedy
from qvattn.lab.plan.costs import layer_parameters
from qvattn.models import CausalLM, CausalLMConfig, TranslationConfig, initialise
from qvattn.variants import VARIANTS

WIDTHS: dict[str, Any] = {"vocab_size": 40, "d_model": 32, "d_ff": 48, "n_heads": 4, "layers": 2, "dropout": 0.0}
NORMED = [name for name, kind in VARIANTS.items() if "qk_norm" in kind.defaults(AttentionSpec(d_model=32, n_heads=4))]
IDS = torch.randint(3, 40, (2, 10), generator=torch.Generator().manual_seed(0))


def language(**fields: Any) -> CausalLM:
    model = CausalLM(CausalLMConfig(**WIDTHS | fields))
    initialise(model, 1)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def agrees_with_itself(model: CausalLM) -> None:
    full, cache = model(IDS).logits, model.new_cache(2)
    parts = torch.cat([model(piece, cache=cache).logits for piece in IDS.split([4, 1, 5], dim=1)], dim=1)
    torch.testing.assert_close(parts, full, atol=1e-5, rtol=1e-5)
    kept: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": 99}
    assert torch.equal(greedy(model, IDS, **kept), model.generate(IDS, do_sample=False, **kept))


def test_variants_with_keys_of_their_own_take_head_norms() -> None:
    assert {"mha", "gqa", "mqa", "shared-v", "thin-key", "qv-ka", "qv-ka-gqa"} <= set(NORMED)
    with pytest.raises(UserError, match="qk_norm=1e-06: variant 'qv' does not use it"):
        AttentionSpec(variant="qv", d_model=32, n_heads=4, qk_norm=1e-6)


@pytest.mark.parametrize("position", ["rope", "none"])
@pytest.mark.parametrize("variant", NORMED)
def test_head_norms(variant: str, position: str) -> None:
    fields = {"variant": variant, "qk_norm": 1e-6}
    model = language(attention=fields, position=position)
    agrees_with_itself(model)
    with torch.no_grad():
        plain = language(attention=variant, position=position)(IDS).logits
        assert not torch.allclose(model(IDS).logits, plain, atol=1e-3)
    spec = model.attention_spec
    per_head = 2 * (spec.d_key or spec.d_head)
    assert layer_parameters(spec) == layer_parameters(spec.replace(qk_norm=None)) + per_head


def test_head_norms_act_on_keys_before_rotation() -> None:
    spec = AttentionSpec(d_model=8, n_heads=1, position="rope", qk_norm=1e-6)
    attention = Attention(spec).eval()
    cache = attention.new_cache()
    with torch.no_grad():
        attention(torch.randn(1, 5, 8), cache=cache)
    size = cache.read(0)["k"].square().mean(-1)
    torch.testing.assert_close(size, torch.ones_like(size), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("share_every", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"parallel_residual": True, "norm_type": "layer", "activation": "gelu-tanh"},
        {"bias": True, "attention": {"variant": "gqa", "out_bias": False}},
        {"ff_bias": False, "embedding_scale": 1.0, "norm_eps": 1e-3},
        {"position": {"kind": "rope", "frequencies": [1.0, 0.3, 0.05, 0.001], "gain": 1.2}},
        {"position": {"kind": "rope", "dim": 4, "frequencies": [1.0, 0.1]}, "attention": "qv"},
    ],
)
def test_options(fields: dict[str, Any], share_every: int) -> None:
    agrees_with_itself(language(**fields, share_every=share_every))


def test_explicit_frequencies_are_what_the_base_gives() -> None:
    base = 500.0
    frequencies = (1.0 / base ** (torch.arange(0, 8, 2) / 8)).tolist()
    same = language(position={"kind": "rope", "frequencies": frequencies})
    other = language(position={"kind": "rope", "base": base})
    with torch.no_grad():
        torch.testing.assert_close(same(IDS).logits, other(IDS).logits, atol=1e-6, rtol=1e-6)


def test_biases_are_where_they_were_asked_for() -> None:
    names = {n.split(".")[-2] for n, _ in language(bias=True, ff_bias=False).named_parameters() if n.endswith("bias")}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    only_in = language(bias=True, ff_bias=False, attention={"variant": "mha", "out_bias": False})
    assert {n.split(".")[-2] for n, _ in only_in.named_parameters() if n.endswith("bias")} == names - {"o_proj"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"norm_eps": 0.0}, "norm_eps=0.0"),
        ({"parallel_residual": True, "norm": "post"}, "parallel_residual=True"),
        ({"activation": "gelu_new"}, "activation='gelu_new': allowed are relu, gelu, gelu-tanh, swiglu"),
        ({"position": {"kind": "rope", "gain": 0.0}}, "position.gain=0.0"),
        ({"position": {"kind": "alibi", "gain": 1.0}}, "position.gain=1.0: 'alibi' has no such option"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        CausalLMConfig(**WIDTHS | fields)


def test_translation_has_no_parallel_residual() -> None:
    with pytest.raises(UserError, match="parallel_residual"):
        TranslationConfig(parallel_residual=True)
