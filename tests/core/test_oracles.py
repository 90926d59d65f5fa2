"""Our layers with copied weights against implementations by others. Each test says which convention was permuted.

Test dependencies only; nothing here is imported by the package.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qvattn.positions import POSITIONS
from qvattn.positions.bias import alibi_slopes, t5_bucket

from .tiny import close, scramble, step_by_step, tiny, tiny_spec, tokens

pytest.importorskip("transformers")

T = 18


def causal_mask(length: int = T) -> Tensor:
    """Additive (1, 1, T, T) mask as Hugging Face layers want it."""
    return torch.full((length, length), float("-inf")).triu(1)[None, None]


def copy_weights(layer: nn.Module, **weights: Tensor) -> None:
    """Set parameters of a layer's variant by name ('.' written as '__'); every parameter must be named."""
    state = {name.replace("__", "."): value.detach() for name, value in weights.items()}
    layer.variant.load_state_dict(state, strict=True)


def same_full_and_cached(layer: Any, x: Tensor, expected: Tensor) -> None:
    close(layer(x), expected)
    close(step_by_step(layer, x, [T - 2, 1, 1]), expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama_gqa_with_rope(kv_heads: int) -> None:
    """Nothing permuted: heads in order, RoPE pairs element i with i + D/2, query i reads shared head i // (H/g)."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=kv_heads, attn_implementation="eager"
    )
    theirs, x = LlamaAttention(config, layer_idx=0), tokens(2, T)
    scramble(theirs)
    rotary = LlamaRotaryEmbedding(config)(x, torch.arange(T)[None])
    expected, _ = theirs(x, position_embeddings=rotary, attention_mask=causal_mask())
    layer = tiny(tiny_spec("gqa", "rope", k_heads=kv_heads, v_heads=kv_heads))
    copy_weights(layer, **{f"{n}_proj__weight": getattr(theirs, f"{n}_proj").weight for n in ("q", "k", "v", "o")})
    same_full_and_cached(layer, x, expected)


@pytest.mark.parametrize("route", ["expand", "absorb"])
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("q_rank", [None, 6])
def test_deepseek_v3_mla(route: Any, interleave: bool, q_rank: int | None) -> None:
    """Permuted: `kv_a_proj_with_mqa` stacks the latent's and the rotary key's rows; `kv_b_proj` holds for each head
    the rows of its key, then of its value, ours are two factors (H, rank, D). DeepSeek lays rotary pairs out as
    (2i, 2i+1) and leaves them de-interleaved; the dot product is the same as ours in place."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    nope, rope, value, rank = 6, 4, 5, 7
    config = DeepseekV3Config(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_rank,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        rope_interleave=interleave,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="eager",
    )
    theirs, x = DeepseekV3Attention(config, layer_idx=0), tokens(2, T)
    scramble(theirs)
    rotary = DeepseekV3RotaryEmbedding(config)(x, torch.arange(T)[None])
    expected, _ = theirs(x, position_embeddings=rotary, attention_mask=causal_mask())[:2]

    position = {"kind": "rope", "layout": "interleaved" if interleave else "half"}
    spec = tiny_spec("mla", position, kv_rank=rank, q_rank=q_rank, d_key=nope, d_value=value, rope_dim=rope)
    layer = tiny(spec, route=route)
    up = theirs.kv_b_proj.weight.view(4, nope + value, rank).mT
    queries = (
        {"q_proj__weight": theirs.q_proj.weight}
        if q_rank is None
        else {
            "q_down__weight": theirs.q_a_proj.weight,
            "q_norm__weight": theirs.q_a_layernorm.weight,
            "q_proj__weight": theirs.q_b_proj.weight,
        }
    )
    copy_weights(
        layer,
        **queries,
        kv_down__weight=theirs.kv_a_proj_with_mqa.weight[:rank],
        k_rope_proj__weight=theirs.kv_a_proj_with_mqa.weight[rank:],
        kv_norm__weight=theirs.kv_a_layernorm.weight,
        latent_to_key=up[..., :nope],
        latent_to_value=up[..., nope:],
        o_proj__weight=theirs.o_proj.weight,
    )
    same_full_and_cached(layer, x, expected)
    assert spec.cache_elements_per_token == rank + rope


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("part", [None, 0.5])
def test_gemma4_k_eq_v(kv_heads: int, part: float | None) -> None:
    """Permuted: Gemma does not scale the score, ours is scaled by 1/sqrt(D), so our query gain is theirs times
    sqrt(D). Its `k_proj` is our `v_proj`; `k_norm`'s gain is our key gain. Its partial RoPE is `proportional`."""
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention, Gemma4TextRotaryEmbedding

    d = 8
    kind = {"rope_type": "default"} if part is None else {"rope_type": "proportional", "partial_rotary_factor": part}
    config = Gemma4TextConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        num_global_key_value_heads=kv_heads,
        head_dim=d,
        global_head_dim=d,
        attention_k_eq_v=True,
        layer_types=["full_attention"],
        rope_parameters={"full_attention": kind | {"rope_theta": 1_000.0}},
        attn_implementation="eager",
    )
    theirs, x = Gemma4TextAttention(config, layer_idx=0), tokens(2, T)
    assert theirs.v_proj is None and theirs.head_dim == d
    scramble(theirs)
    rotary = Gemma4TextRotaryEmbedding(config)(x, torch.arange(T)[None], "full_attention")
    expected, _ = theirs(x, position_embeddings=rotary, attention_mask=causal_mask(), shared_kv_states={})

    position = {"kind": "rope", "base": 1_000.0}
    if part is not None:
        position |= {"dim": int(part * d), "proportional": True}
    layer = tiny(tiny_spec("k-eq-v", position, d_head=d, v_heads=kv_heads))
    copy_weights(
        layer,
        q_proj__weight=theirs.q_proj.weight,
        v_proj__weight=theirs.k_proj.weight,
        o_proj__weight=theirs.o_proj.weight,
        q_gain=theirs.q_norm.weight * math.sqrt(d),
        k_gain=theirs.k_norm.weight,
    )
    same_full_and_cached(layer, x, expected)
    assert layer.spec.cache_elements_per_token == kv_heads * d


@pytest.mark.parametrize("decoder", [False, True])
def test_t5(decoder: bool) -> None:
    """Permuted: T5 does not scale the score, so our query projection is theirs times sqrt(D); its bias embedding
    (buckets, H) is our table transposed."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=16,
        d_kv=4,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        dropout_rate=0.0,
        is_decoder=decoder,
        attn_implementation="eager",
    )
    theirs, x = T5Attention(config, has_relative_attention_bias=True, layer_idx=0), tokens(2, T)
    scramble(theirs)
    bias = theirs.compute_bias(T, T) + (causal_mask() if decoder else 0)
    expected = theirs(x, position_bias=bias)[0]
    layer = tiny(tiny_spec("mha", {"kind": "t5", "buckets": 8, "max_distance": 12}, causal=decoder))
    copy_weights(
        layer,
        q_proj__weight=theirs.q.weight * 2,
        k_proj__weight=theirs.k.weight,
        v_proj__weight=theirs.v.weight,
        o_proj__weight=theirs.o.weight,
    )
    with torch.no_grad():
        layer.position.bias.copy_(theirs.relative_attention_bias.weight.T)
    close(layer(x), expected)
    if decoder:
        close(step_by_step(layer, x, [T - 2, 1, 1]), expected)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (4, 64), (64, 1000)])
@pytest.mark.parametrize("causal", [False, True])
def test_t5_buckets_at_every_distance(causal: bool, buckets: int, max_distance: int) -> None:
    """Permuted: T5 counts memory - query, we count query - key."""
    from transformers.models.t5.modeling_t5 import T5Attention

    delta = torch.arange(-1200, 1201)
    theirs = T5Attention._relative_position_bucket(
        -delta, bidirectional=not causal, num_buckets=buckets, max_distance=max_distance
    )
    ours = t5_bucket(delta, causal=causal, buckets=buckets, max_distance=max_distance)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("heads", [*range(1, 21), 32, 40, 71, 112])
def test_bloom_alibi_slopes(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    close(torch.tensor(alibi_slopes(heads)), theirs, 1e-6)
    add = POSITIONS["alibi"](heads, True, {}).tables(0, 5).add
    close(add, -theirs[:, None] * torch.arange(6), 1e-6)


@pytest.mark.parametrize("heads", [4, 6])
def test_bloom_attention(heads: int) -> None:
    """Permuted: BLOOM fuses q, k and v of each head into one projection (H, 3, D). Its ALiBi counts the key's
    position instead of minus the distance: the same up to a constant per query, which softmax does not see. Its layer
    adds the residual."""
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    width = 4 * heads
    config = BloomConfig(hidden_size=width, n_head=heads, hidden_dropout=0.0, attention_dropout=0.0)
    theirs, x = BloomAttention(config, layer_idx=0).eval(), tokens(2, T, width=width)
    scramble(theirs)
    alibi = build_alibi_tensor(torch.ones(2, T), heads, torch.float32)
    expected = theirs(x, torch.zeros_like(x), alibi, causal_mask())[0]
    layer = tiny(tiny_spec("mha", "alibi", d_model=width, n_heads=heads, bias=True))
    w = theirs.query_key_value.weight.view(heads, 3, 4, width)
    b = theirs.query_key_value.bias.view(heads, 3, 4)
    fused = {
        f"{n}_proj__{kind}": part[:, i].flatten(0, 1)
        for i, n in enumerate(("q", "k", "v"))
        for kind, part in (("weight", w), ("bias", b))
    }
    copy_weights(layer, **fused, o_proj__weight=theirs.dense.weight, o_proj__bias=theirs.dense.bias)
    same_full_and_cached(layer, x, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["none", "alibi"])
@pytest.mark.parametrize("variant", ["mha", "mqa"])
@pytest.mark.parametrize("heads", [4, 6])
def test_x_transformers(heads: int, variant: str, position: str, causal: bool) -> None:
    """Nothing permuted; its ALiBi is a module handed to the layer as `rel_pos`, symmetric where bidirectional."""
    x_transformers = pytest.importorskip("x_transformers.x_transformers")
    width = 4 * heads
    theirs = x_transformers.Attention(
        width, dim_head=4, heads=heads, causal=causal, one_kv_head=variant == "mqa", flash=False
    ).eval()
    scramble(theirs)
    x = tokens(2, T, width=width)
    rel_pos = x_transformers.AlibiPositionalBias(heads=heads) if position == "alibi" else None
    expected = theirs(x, rel_pos=rel_pos)
    expected = expected[0] if isinstance(expected, tuple) else expected
    layer = tiny(tiny_spec(variant, position, d_model=width, n_heads=heads, causal=causal))
    copy_weights(
        layer,
        q_proj__weight=theirs.to_q.weight,
        k_proj__weight=theirs.to_k.weight,
        v_proj__weight=theirs.to_v.weight,
        o_proj__weight=theirs.to_out.weight,
    )
    close(layer(x), expected)
    if causal:
        close(step_by_step(layer, x, [T - 2, 1, 1]), expected)


def test_torch_multi_head_attention() -> None:
    """Permuted: PyTorch stacks q, k and v in one `in_proj`. Cross-attention with padding in the memory."""
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    scramble(theirs)
    x, memory = tokens(2, 3), tokens(2, 5, seed=2)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]])
    expected, _ = theirs(x, memory, memory, key_padding_mask=positions < 0)
    layer = tiny(tiny_spec("mha", bias=True))
    weights = zip(theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), "qkv", strict=True)
    copies = {f"{n}_proj__{kind}": p for w, b, n in weights for kind, p in (("weight", w), ("bias", b))}
    copy_weights(layer, **copies, o_proj__weight=theirs.out_proj.weight, o_proj__bias=theirs.out_proj.bias)
    close(layer(x, memory=memory, memory_positions=positions), expected)
