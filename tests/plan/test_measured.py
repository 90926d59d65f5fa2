"""What the planner predicts is what a cache holds: real models with random weights, and this project's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qvattn.lab.plan import Workload, shape_of, shape_of_config
from qvattn.lab.plan.convert import candidates
from qvattn.lab.plan.costs import bytes_per_token, decode_step, layer_parameters, row_cache_bytes, state_bytes
from qvattn.models import CausalLM, CausalLMConfig, TranslationConfig, TranslationModel
from qvattn.streams import StreamCache
from qvattn.variants import VARIANTS

from .small import CASES, config_of, measured_bytes

WIDTHS = {"d_model": 48, "d_ff": 64, "n_heads": 4}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("case", CASES)
def test_cache_bytes_equal_the_librarys_cache(case: str, tokens: int) -> None:
    config = config_of(case)
    work = Workload(context=tokens, batch=2, cache_dtype=torch.float32)
    predicted = 2 * row_cache_bytes(shape_of_config(config).layers, work)
    assert predicted == measured_bytes(config, tokens, batch=2)


@pytest.mark.parametrize(
    "case", ["llama grouped", "gemma4 k = v", "deepseek v3", "qwen3-next", "qwen3.5", "mamba", "mamba2", "lfm2"]
)
def test_in_sixteen_bit_too(case: str) -> None:
    config = config_of(case)
    predicted = row_cache_bytes(shape_of_config(config).layers, Workload(context=7, batch=1))
    assert predicted == measured_bytes(config, 7, batch=1, dtype=torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_the_models(case: str) -> None:
    config = config_of(case)
    model = AutoModelForCausalLM.from_config(config)
    weights = shape_of_config(config).weights
    assert weights.total == model.num_parameters()
    assert 0 < weights.active <= weights.total


@pytest.mark.parametrize("case", ["llama grouped", "mistral window", "qwen3 odd head", "deepseek v3"])
def test_attention_parameters_equal_the_modules(case: str) -> None:
    """Layers of a spec hold as many weights as the library's own attention, norms of heads apart."""
    config = config_of(case)
    model = AutoModelForCausalLM.from_config(config)
    for layer, block in zip(shape_of_config(config).layers, model.model.layers, strict=True):
        assert layer.spec is not None
        norms = sum(p.numel() for n, p in block.self_attn.named_parameters() if n in ("q_norm.weight", "k_norm.weight"))
        assert layer_parameters(layer.spec) == sum(p.numel() for p in block.self_attn.parameters()) - norms


@pytest.mark.parametrize("share_every", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_own_language_models(variant: str, share_every: int, tmp_path: Path) -> None:
    config = CausalLMConfig(vocab_size=32, layers=4, attention=variant, share_every=share_every, **WIDTHS)
    model = CausalLM(config).eval()
    model.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    cache = model.new_cache(batch_size=3, capacity=4)
    with torch.no_grad():
        model(input_ids=torch.randint(3, 30, (3, 7)), cache=cache)
    work = Workload(context=7, batch=3, cache_dtype=cache.dtype)
    assert 3 * row_cache_bytes(shape.layers, work) == cache.nbytes
    assert shape.weights.total == model.num_parameters()


@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_counts_the_scales(variant: str) -> None:
    """One float32 scale per token and shared head of every stream, as `StreamCache` stores them."""
    config = CausalLMConfig(vocab_size=32, layers=4, attention=variant, share_every=2, **WIDTHS)
    layers = shape_of_config(config).layers
    cache = StreamCache(CausalLM(config).decoder_stack.cache_layers, batch_size=3, dtype=torch.int8)
    cache.advance(torch.arange(7).expand(3, 7))
    work = Workload(context=7, batch=3, cache_dtype=torch.int8)
    assert 3 * row_cache_bytes(layers, work) == cache.nbytes
    assert bytes_per_token(layers, torch.int8) == cache.nbytes / (3 * 7)
    heads = sum(stream.heads for layer in layers for stream in layer.stored)
    assert bytes_per_token(layers, torch.int8) == bytes_per_token(layers, torch.float32) / 4 + 4 * heads


def test_int8_steps_read_and_write_the_scales() -> None:
    config = CausalLMConfig(vocab_size=32, layers=1, attention="mha", **WIDTHS)
    shape = shape_of_config(config)
    step = decode_step(shape.layers, shape.weights, Workload(context=10, batch=2, cache_dtype=torch.int8))
    token = 2 * 4 * (12 + 4)  # keys and values of 4 heads: 12 bytes of entries and a scale
    assert step.cache_bytes_written == 2 * token
    assert step.cache_bytes_read == 2 * 10 * token


def test_int8_leaves_constant_states_in_sixteen_bit() -> None:
    layers = shape_of_config(config_of("lfm2")).layers
    states = [sum(state_bytes(layer, dtype) for layer in layers) for dtype in (torch.int8, torch.bfloat16)]
    assert states[0] == states[1] > 0


def test_a_window_of_ours_cuts_nothing() -> None:
    config = CausalLMConfig(vocab_size=32, layers=2, attention={"variant": "qv", "window": 3}, **WIDTHS)
    model = CausalLM(config).eval()
    cache = model.new_cache(batch_size=1)
    with torch.no_grad():
        model(input_ids=torch.randint(3, 30, (1, 9)), cache=cache)
    layers = shape_of_config(config).layers
    assert row_cache_bytes(layers, Workload(context=9, batch=1, cache_dtype=cache.dtype)) == cache.nbytes


def test_own_translation_models() -> None:
    attention = {"encoder": "mha", "decoder": "qv-ka", "cross": {"variant": "gqa", "v_heads": 2}}
    config = TranslationConfig(
        source_vocab_size=32, target_vocab_size=32, encoder_layers=1, decoder_layers=2, attention=attention, **WIDTHS
    )
    model = TranslationModel(config).eval()
    shape = shape_of_config(config)
    sources, targets = torch.randint(3, 30, (2, 5)), torch.randint(3, 30, (2, 8))
    cache = model.new_cache(batch_size=2)
    with torch.no_grad():
        memory = model.encode_sources(sources).memory
        model(input_ids=sources, decoder_input_ids=targets, cache=cache)
    work = Workload(context=8, batch=2, source=5, cache_dtype=torch.float32)
    own = [layer for layer in shape.layers if not layer.over_source]
    across = [layer for layer in shape.layers if layer.over_source]
    assert 2 * row_cache_bytes(own, work) == cache.nbytes
    assert 2 * row_cache_bytes(across, work) == memory.nbytes
    assert shape.weights.total == model.num_parameters()
    encoder = sum(p.numel() for p in model.encoder.parameters())
    assert shape.weights.read == model.num_parameters() - encoder


@pytest.mark.parametrize("case", ["llama square", "gemma3", "gemma4 k = v", "gemma4 shared"])
def test_conversions_equal_a_stream_cache(case: str) -> None:
    """What a converted model is said to store (before any window is full) is what a StreamCache of its specs holds."""
    for layers in candidates(shape_of_config(config_of(case)).layers)[0].values():
        if any(layer.reads is not None for layer in layers):
            continue  # the library's own double storage
        cache = StreamCache([layer.stored for layer in layers], batch_size=1)
        cache.advance(torch.arange(3)[None])
        assert cache.nbytes == row_cache_bytes(layers, Workload(context=3, batch=1, cache_dtype=torch.float32))
