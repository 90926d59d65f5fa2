"""int8 streams: the documented bound of the error, and a cache that quantises on append."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qvattn import Attention, AttentionSpec
from qvattn.quantised import LEVELS, QuantisedStream, all_dense, quantise
from qvattn.streams import Stream, StreamCache


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([1e-30, 1e-4, 1.0, 3e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_at_most_half_a_level(seed: int, size: float, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    x = (size * torch.randn(2, 3, 5, 7)).to(dtype)
    small = quantise(x)
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    assert bool(((small.dequantise() - x.float()).abs() <= largest / (2 * LEVELS) * (1 + 1e-5)).all())
    assert small.data.dtype is torch.int8
    assert small.scale.shape == (2, 3, 5)


def test_zeros_stay_zeros() -> None:
    small = quantise(torch.zeros(1, 1, 2, 4))
    assert bool((small.dequantise() == 0).all())


def test_error_of_attention_follows_from_the_bound() -> None:
    """Weights sum to 1, so the part of the error that comes from the values is at most the bound itself."""
    torch.manual_seed(0)
    v = torch.randn(1, 2, 50, 32)
    small = quantise(v)
    a = torch.softmax(torch.randn(1, 2, 1, 50), dim=-1)
    error = (a @ small.dequantise() - a @ v).abs().amax()
    assert error <= v.abs().amax() / (2 * LEVELS)


def test_cache_quantises_on_append_and_keeps_its_promises() -> None:
    torch.manual_seed(0)
    cache = StreamCache(
        [[Stream(name="v", heads=2, width=6, scores=True, values=True)]], 2, capacity=2, dtype=torch.int8
    )
    x = torch.randn(2, 2, 5, 6)
    for t in range(5):
        cache.advance(torch.full((2, 1), t))
        cache.write(0, {"v": x[:, :, t : t + 1]})
    stored = cache.read(0)["v"]
    assert isinstance(stored, QuantisedStream)
    assert torch.equal(stored.data, quantise(x).data)
    assert torch.equal(stored.scale, quantise(x).scale)
    assert cache.nbytes == 2 * 5 * 2 * (6 + 4)  # rows, tokens, heads, bytes of elements and scale
    twin = cache.fork()
    cache.reorder(torch.tensor([1, 1]))
    assert torch.equal(all_dense(cache.read(0))["v"][0], stored.dequantise()[1])
    assert torch.equal(all_dense(twin.read(0))["v"], stored.dequantise())


@pytest.mark.parametrize("variant", ["mha", "qv", "qv-ka", "mla", "gqa", "k-eq-v"])
@pytest.mark.parametrize("position", ["none", "rope", "agf+pcm-v"])
def test_attention_over_an_int8_cache(variant: str, position: str) -> None:
    """Near the same layer over float32; and the native kernel agrees with the reference on the same cache."""
    spec = AttentionSpec(variant=variant, d_model=32, n_heads=4, position=position)
    outs = {}
    for impl in ("reference", "auto"):
        for dtype in (torch.float32, torch.int8):
            torch.manual_seed(3)
            layer = Attention(spec, impl=impl)
            x = torch.randn(2, 9, 32)
            with torch.no_grad():
                cache = layer.new_cache(2, dtype=dtype)
                outs[impl, dtype] = torch.cat([layer(part, cache=cache) for part in x.split([5, 1, 3], dim=1)], dim=1)
    size = outs["reference", torch.float32].abs().max()
    assert (outs["auto", torch.int8] - outs["reference", torch.int8]).abs().max() < 3e-4 * size
    assert (outs["reference", torch.int8] - outs["reference", torch.float32]).abs().max() < 0.03 * size
