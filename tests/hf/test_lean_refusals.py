"""What `lean` refuses, by name, and what it does at the edge of its tolerance."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import StaticCache, T5Config, T5ForConditionalGeneration

from qvattn import UserError
from qvattn.hf import lean

from .families import causal, gpt2
from .test_lean_causal import in_calls, tokens


def test_unsupported_architectures_are_named() -> None:
    config = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(UserError, match=r"model_type='t5'.*supported are .*deepseek_v3.*llama"):
        lean(T5ForConditionalGeneration(config))
    with pytest.raises(UserError, match="model_type=None"):
        lean(torch.nn.Linear(2, 2))


def test_shared_key_heads_are_refused() -> None:
    with pytest.raises(UserError, match="4 query heads share 2 key heads"):
        lean(causal("llama", num_key_value_heads=2))


def test_gemma_without_equal_keys_and_values_is_refused() -> None:
    with pytest.raises(UserError, match=r"gemma4_text.*(sliding|attention_k_eq_v)"):
        lean(causal("gemma4", attention_k_eq_v=False))


def test_twice_is_refused_and_so_is_an_implementation_with_other_masks() -> None:
    model = causal("opt")
    report = lean(model)
    with pytest.raises(UserError, match="lean already"):
        lean(model)
    report.undo()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UserError, match="flex_attention"):
        lean(model)


def ill_conditioned(condition: float) -> torch.nn.Module:
    """A Llama whose second layer's W_K has this condition number."""
    model = causal("llama")
    weight = model.model.layers[1].self_attn.k_proj.weight
    u, s, v = torch.linalg.svd(weight.detach().double())
    s = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), len(s), dtype=torch.float64) * s[0]
    with torch.no_grad():
        weight.copy_(u @ s.diag() @ v)
    return model


def test_an_ill_conditioned_layer_is_refused_by_name_or_left_alone() -> None:
    model = ill_conditioned(1e5)
    with pytest.raises(UserError, match=r"partial=True.*layers\.1\.self_attn: W_K has condition number 1e\+05"):
        lean(model)
    plain, ids = copy.deepcopy(model), tokens(2, 40)
    report = lean(model, partial=True)
    assert [layer.lean for layer in report.layers] == [True, False, True]
    assert report.layers[1].bytes_before == report.layers[1].bytes_after
    expected = in_calls(plain, ids, [40])[0]
    torch.testing.assert_close(in_calls(model, ids, [20, 3, 17])[0], expected, rtol=1e-4, atol=1e-4)


def test_a_larger_tolerance_admits_it_with_the_error_it_names() -> None:
    model = ill_conditioned(1e5)
    plain, ids = copy.deepcopy(model), tokens(2, 40)
    lean(model, tolerance=0.05)
    expected, got = in_calls(plain, ids, [40])[0], in_calls(model, ids, [20, 3, 17])[0]
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


def test_half_precision_slim_is_refused_since_rounding_is_amplified() -> None:
    with pytest.raises(UserError, match="bfloat16"):
        lean(causal("llama").bfloat16())


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4"])
def test_bfloat16_stays_within_its_own_rounding(name: str) -> None:
    plain = causal(name)
    rounded = copy.deepcopy(plain).bfloat16()
    other = copy.deepcopy(rounded)
    lean(other)
    ids = tokens(2, 40)
    exact = in_calls(plain, ids, [40])[0]
    own = (in_calls(rounded, ids, [30, 1, 9])[0].float() - exact).abs().mean()
    ours = (in_calls(other, ids, [30, 1, 9])[0].float() - exact).abs().mean()
    assert ours < 1.3 * own


def test_foreign_caches_are_refused() -> None:
    model = causal("gpt2")
    ids = tokens(1, 8)
    filled = in_calls(model, ids, [8])[1]
    lean(model)
    with pytest.raises(UserError, match="filled before"):
        model(input_ids=ids[:, :1], cache=filled)
    with pytest.raises(UserError, match="StaticLayer"):
        model(input_ids=ids, cache=StaticCache(config=gpt2(), max_cache_len=16))


def test_changed_weights_are_noticed() -> None:
    model, ids = causal("opt"), tokens(2, 30)
    other = copy.deepcopy(model)
    lean(other)
    in_calls(other, ids, [29, 1])
    with torch.no_grad():
        for m in (model, other):
            m.model.decoder.layers[0].self_attn.v_proj.weight.mul_(-2)
    torch.testing.assert_close(in_calls(other, ids, [20, 10])[0], in_calls(model, ids, [30])[0], rtol=1e-3, atol=1e-3)


def test_report_is_readable() -> None:
    report = lean(causal("llama_scaled"))
    text = str(report)
    assert "slim: K only, rotated on read" in text and "once for all layers" in text
    told = report.to_dict()
    assert told["bytes_per_token_before"] == 3 * 2 * 32 * 4
    assert told["bytes_per_token_after"] == 3 * 32 * 4 + 8 * 4
    assert told["folded_bytes"] == 3 * (32 * 32 + 32) * 4
