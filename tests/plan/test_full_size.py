"""Numbers of well-known models, worked out by hand from their published configs."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig, MistralConfig, PreTrainedConfig

from qvattn.lab.plan import Plan, PlanRow, Shape, Workload, choose, plan, shape_of_config
from qvattn.lab.plan.costs import bytes_per_token, decode_step, row_cache_bytes

LLAMA3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
OPENELM_270M = {
    "num_query_heads": [12] * 5 + [16] * 7 + [20] * 4,
    "num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4,
    "ffn_multipliers": [0.5, 0.73, 0.97, 1.2, 1.43, 1.67, 1.9, 2.13, 2.37, 2.6, 2.83, 3.07, 3.3, 3.53, 3.77, 4.0],
    "ffn_dim_divisor": 256,
    "model_dim": 1280,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_context_length": 2048,
    "normalize_qk_projections": True,
    "share_input_output_layers": True,
}


@pytest.fixture(scope="module")
def llama3() -> Shape:
    return shape_of_config(LlamaConfig(**LLAMA3_8B))


@pytest.fixture(scope="module")
def llama3_plan(llama3: Shape) -> Plan:
    return plan(llama3, Workload(context=8192, batch=8), choose(["h100-sxm"]))


def row(result: Plan, name: str) -> PlanRow:
    return next(one for one in result.rows if one.name == name)


def test_llama_3_8b_cache(llama3: Shape) -> None:
    work = Workload(context=8192, batch=1)
    # 2 (K, V) x 8 heads x 128 elements x 2 bytes x 32 layers
    assert bytes_per_token(llama3.layers, work.cache_dtype) == 2 * 8 * 128 * 2 * 32 == 131072
    assert row_cache_bytes(llama3.layers, work) == 2**30
    # int8: a byte per element, and per token, head and stream a float32 scale
    assert bytes_per_token(llama3.layers, torch.int8) == 2 * 8 * (128 + 4) * 32 == 67584
    assert llama3.weights.total == 8_030_261_248  # as the checkpoint has it
    assert llama3.weights.read == 8_030_261_248 - 128256 * 4096  # the lookup table is not read


def test_llama_3_8b_operations_and_roofline(llama3: Shape, llama3_plan: Plan) -> None:
    # 2 per weight that is read; scores and sums: 2 x 2 x 32 heads x 128 x 8192 tokens x 32 layers
    as_is = row(llama3_plan, "as it is")
    assert as_is.flops_per_token == 2 * llama3.weights.read + 4 * 32 * 128 * 8192 * 32
    # bytes of a step: weights once, 8 caches of 2^30 read, 8 x 131072 written; 3.35 TB/s
    moved = 2 * llama3.weights.read + 8 * 2**30 + 8 * 131072
    assert as_is.bytes_per_decoded_token == moved / 8
    assert as_is.rooflines[0].tokens_per_second == pytest.approx(8 / (moved / 3.35e12))
    assert as_is.rooflines[0].bound == "memory" and as_is.rooflines[0].fits
    assert as_is.intensity == pytest.approx(8 * as_is.flops_per_token / moved)


def test_llama_3_8b_in_80_gigabytes(llama3_plan: Plan) -> None:
    room = 80e9 - 2 * 8_030_261_248
    as_is = row(llama3_plan, "as it is")
    assert as_is.largest_batch == int(room // 2**30) == 59
    assert as_is.longest_context == int(room // (8 * 131072)) == 60977


def test_llama_3_8b_conversions(llama3_plan: Plan) -> None:
    def share(name: str) -> float:
        return row(llama3_plan, name).cache_bytes_per_token / 131072

    assert share("qv-gqa") == 1 / 2  # 8 value heads, no keys
    assert share("qv") == 2  # 32 value heads: more than 2 x 8
    assert share("qv-mqa") == 1 / 16
    assert share("mla") == (512 + 64) / 2048
    assert not any(one.exact for one in llama3_plan.rows if one.name != "as it is")
    # no keys: 32 layers without 4096 x 1024 weights
    assert row(llama3_plan, "qv-gqa").parameters == 8_030_261_248 - 32 * 4096 * 1024


def test_llama_2_7b_has_an_exact_half() -> None:
    shape = shape_of_config(LlamaConfig())
    result = plan(shape, Workload(context=4096, batch=1), choose(["a100-sxm-80gb"]))
    assert shape.weights.total == 6_738_415_616
    assert row(result, "as it is").cache_bytes_per_token == 2 * 32 * 128 * 2 * 32 == 524288
    slim = row(result, "slim")
    assert slim.exact and slim.cache_bytes_per_token == 524288 / 2 and slim.parameters == shape.weights.total
    assert result.exact_choice == "slim"


def test_deepseek_v3() -> None:
    shape = shape_of_config(DeepseekV3Config())
    work = Workload(context=1000, batch=1)
    assert {layer.stored_elements for layer in shape.layers} == {512 + 64}
    assert bytes_per_token(shape.layers, work.cache_dtype) == 576 * 2 * 61 == 70272
    assert bytes_per_token(shape.layers, torch.int8) == ((512 + 4) + (64 + 4)) * 61 == 35624
    assert shape.weights.total == 671_026_404_352
    # 58 layers of 256 experts with three matrices of 7168 x 2048
    assert shape.weights.experts == 58 * 256 * 3 * 7168 * 2048
    assert shape.weights.active == shape.weights.read + shape.weights.experts / 32
    assert shape.weights.active == pytest.approx(37e9, rel=0.02)  # "37B activated"
    # per head: latent 512 and rotary 64 scored, latent 512 summed
    longer = decode_step(shape.layers, shape.weights, Workload(context=2000, batch=1))
    grown = longer.flops_per_token - decode_step(shape.layers, shape.weights, work).flops_per_token
    assert grown == 61 * 128 * 2 * (512 + 64 + 512) * 1000


def test_gemma_3_27b_windows() -> None:
    config = Gemma3TextConfig(
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        sliding_window=1024,
        vocab_size=262208,
    )
    shape = shape_of_config(config)
    layer = 2 * 16 * 128 * 2
    assert row_cache_bytes(shape.layers, Workload(context=131072, batch=1)) == layer * (10 * 131072 + 52 * 1023)
    assert row_cache_bytes(shape.layers, Workload(context=512, batch=1)) == layer * 62 * 512


def test_mistral_7b_has_no_longest_context() -> None:
    config = MistralConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        sliding_window=4096,
    )
    result = plan(shape_of_config(config), Workload(context=32768, batch=1), choose(["l4"]))
    as_is = row(result, "as it is")
    assert as_is.parameters == 7_241_732_096
    assert as_is.cache_bytes == 131072 * 4095
    assert as_is.longest_context is None  # every layer has a window: it ends nowhere
    assert as_is.largest_batch == (24e9 - 2 * 7_241_732_096) // (131072 * 4095)


def test_openelm_270m_has_heads_per_layer() -> None:
    config = PreTrainedConfig(**OPENELM_270M)
    config.model_type = "openelm"
    shape = shape_of_config(config)
    # 2 x 64 x (5 layers of 3 heads + 7 of 4 + 4 of 5) x 2 bytes
    assert bytes_per_token(shape.layers, Workload(context=0, batch=1).cache_dtype) == 2 * 64 * 63 * 2
    assert shape.weights.total == 271_527_168  # as the checkpoint has it
    assert {layer.kind for layer in shape.layers} == {
        f"full attention, {q}/{kv} heads" for q, kv in ((12, 3), (16, 4), (20, 5))
    }
