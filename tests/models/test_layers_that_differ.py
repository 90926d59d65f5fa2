"""Layers that differ: every layer's own attention, in the model, in decoding, in the cache and in the planner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qvattn import UserError
from qvattn.decode import greedy
from qvattn.lab.plan.own import of_causal_lm
from qvattn.models import CausalLM, CausalLMConfig, TranslationConfig, TranslationModel, initialise

WIDTHS: dict[str, Any] = {"vocab_size": 40, "d_model": 32, "d_ff": 48, "n_heads": 4, "layers": 3}
LAYERS: list[Any] = [
    {"variant": "qv-ka-gqa", "v_heads": 2, "d_ctx": 6},
    {"variant": "qv-ka-gqa", "v_heads": 2, "d_ctx": 10, "window": 5},
    {"variant": "gqa", "k_heads": 2, "v_heads": 1, "position": "none"},
]
ELEMENTS = [2 * 8 + 6, 2 * 8 + 10, 2 * 8 + 1 * 8]


def model(**fields: Any) -> CausalLM:
    made = CausalLM(CausalLMConfig(**WIDTHS | {"attention": {"decoder": LAYERS}} | fields))
    initialise(made, 1)
    return made.eval()


IDS = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(0))


def test_each_layer_has_its_own_streams_and_the_cache_holds_what_they_say() -> None:
    lm = model()
    cache = lm.new_cache(2)
    with torch.no_grad():
        lm(IDS, cache=cache)
    assert [sum(s.shape[1] * s.shape[3] for s in cache.read(i).values()) for i in range(3)] == ELEMENTS
    assert lm.cache_elements_per_token() == sum(ELEMENTS)
    assert cache.nbytes == 2 * 12 * 4 * sum(ELEMENTS)
    planned = of_causal_lm(lm.config, "it")
    assert [layer.stored_elements for layer in planned.layers] == ELEMENTS


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 6]])
def test_cached_equals_full(chunks: list[int]) -> None:
    lm = model()
    with torch.no_grad():
        full = lm(IDS).logits
        cache = lm.new_cache(2)
        parts = torch.cat([lm(piece, cache=cache).logits for piece in IDS.split(chunks, dim=1)], dim=1)
    torch.testing.assert_close(parts, full, atol=1e-5, rtol=1e-5)


def test_the_window_is_the_layers_own() -> None:
    everywhere = model(attention={"decoder": [layer | {"window": 5} for layer in LAYERS]})
    with torch.no_grad():
        assert not torch.allclose(everywhere(IDS).logits[:, -1], model()(IDS).logits[:, -1], atol=1e-4)
        # one windowed layer hides nothing from its neighbours; three of them see 3 * 4 tokens back
        torch.testing.assert_close(everywhere(IDS).logits[:, :5], model()(IDS).logits[:, :5], atol=1e-6, rtol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_lean_decoding_equals_generate(padded: bool) -> None:
    lm, mask = model(), torch.ones_like(IDS)
    if padded:
        mask[0, :4] = 0
    kept: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": 99}
    expected = lm.generate(IDS, attention_mask=mask, do_sample=False, **kept)
    assert torch.equal(greedy(lm, IDS, mask, **kept), expected)


def test_save_and_load(tmp_path: Any) -> None:
    lm = model()
    lm.save_pretrained(tmp_path)
    again = CausalLM.from_pretrained(tmp_path).eval()
    assert again.config.decoder_specs == lm.config.decoder_specs
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, lm(IDS).logits)


def test_translation_takes_a_list_too() -> None:
    widths: dict[str, Any] = {"d_model": 32, "d_ff": 48, "n_heads": 4, "encoder_layers": 1, "decoder_layers": 2}
    config = TranslationConfig(**widths, attention={"decoder": ["qv", "mqa"], "cross": ["mha", "gqa"]})
    names = [(b.self_attn.spec.variant, b.cross_attn.spec.variant) for b in TranslationModel(config).decoder.blocks()]
    assert names == [("qv", "mha"), ("mqa", "gqa")]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention": {"decoder": LAYERS[:2]}}, r"attention.decoder.*2 descriptions for 3 layers"),
        ({"share_every": 2, "layers": 2, "attention": {"decoder": ["qv", "mqa"]}}, r"layer 1 shares .* layer 0"),
        ({"layers": 2, "attention": {"decoder": [{"position": "learned"}, "qv"]}}, r"layer 1 has position='rope'"),
        ({"layers": 2, "attention": {"decoder": ["qv", 3]}}, "attention=3"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        CausalLMConfig(**WIDTHS | fields)
