"""Foreign architectures, adopted and converted: exact where the algebra says so.

With as many value heads as the model is wide, V determines the input of the layer, so keys rebuilt from all values are
exact with any G; grouped models are given a latent that holds all of [K; V].
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from qvattn.hf import adopt
from qvattn.hf.convert import Target, convert_layers
from qvattn.hf.convert.run import assembled
from qvattn.hf.convert.specs import target_specs
from qvattn.hf.convert.weighing import by_activations, by_sensitivity

VOCABULARY: dict[str, Any] = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
FULL, SHARED = WIDTHS | {"num_key_value_heads": 4}, WIDTHS | {"num_key_value_heads": 2}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40, "initializer_range": 0.3}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama, one key a query": (LlamaConfig(**VOCABULARY, **FULL), {"variant": "qv-ka", "g_width": 1}),
    "llama with biases": (LlamaConfig(**VOCABULARY, **FULL, attention_bias=True), {"variant": "qv-ka", "g_width": 1}),
    "gpt-2": (GPT2Config(**VOCABULARY, **GPT2), {"variant": "qv-ka", "g_width": 1}),
    "gpt-neox, a part turned": (
        GPTNeoXConfig(**VOCABULARY, **WIDTHS, rotary_pct=0.5),
        {"variant": "qv-ka", "g_width": 1},
    ),
    "gpt-neox, nothing shared": (
        GPTNeoXConfig(**VOCABULARY, **WIDTHS, rotary_pct=1.0),
        {"variant": "qv-ka-gqa", "g_width": 1},
    ),
    "qwen 3, norms of heads": (Qwen3Config(**VOCABULARY, **FULL, head_dim=4), {"variant": "qv-ka", "g_width": 1}),
    "qwen 2, shared heads": (Qwen2Config(**VOCABULARY, **SHARED), {"variant": "qv-ka-gqa", "g_width": 7}),
    "mistral with a window": (
        MistralConfig(**VOCABULARY, **SHARED, sliding_window=8),
        {"variant": "mla", "kv_rank": 15},
    ),
}
EXACT = {"qwen 2, shared heads": 0.5, "mistral with a window": 0.5}
"""Cases with a direction missing: the largest share of the logits' spread that may be lost."""


@pytest.mark.parametrize("weighing", ["activations", "sensitivity"])
@pytest.mark.parametrize("case", CASES)
def test_adopted_models_convert(case: str, weighing: str) -> None:
    config, target = CASES[case]
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.3)
    ids = torch.randint(3, 61, (3, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = theirs(ids).logits
    model = adopt(theirs)
    windows = torch.randint(3, 61, (6, 32), generator=torch.Generator().manual_seed(3))
    if weighing == "activations":
        weighings = by_activations(model, windows)
    else:
        weighings = by_sensitivity(model, windows, seed=0, progress=lambda *_: None)
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
    specs = target_specs(model, Target(**target))
    convert_layers(model, specs, windows, weighings)
    model = assembled(model, specs).eval()
    with torch.no_grad():
        lost = (model(input_ids=ids).logits - wanted).abs().max() / wanted.std()
    assert lost < EXACT.get(case, 2e-3), float(lost)
    assert model.cache_elements_per_token() == sum(spec.cache_elements_per_token for spec in specs)
