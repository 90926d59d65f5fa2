"""Cross-attention over the encoder's output: the logits, tokens and scores of the unmodified model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from qvattn.hf import lean
from qvattn.hf.exact.layers import cache_nbytes
from qvattn.hf.exact.sources import Source, SourceLayer

from .families import SEQ2SEQ, seq2seq
from .test_lean_causal import TOLERANCE, tokens


def pair(kind: str, implementation: str = "sdpa") -> tuple[Any, Any, Any]:
    plain = seq2seq(kind, implementation)
    other = copy.deepcopy(plain)
    return plain, other, lean(other)


def sources(kind: str, lengths: list[int]) -> dict[str, Tensor]:
    """Inputs of the encoder, right padded; sound has no padding."""
    rows, longest = len(lengths), max(lengths)
    if kind == "whisper":
        return {"input_features": torch.randn(rows, 6, 48, generator=torch.Generator().manual_seed(1))}
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    return {"input_ids": tokens(rows, longest, 4).masked_fill(~mask, 0), "attention_mask": mask.long()}


@torch.no_grad()
def in_calls(model: Any, given: dict[str, Tensor], ids: Tensor, sizes: list[int]) -> tuple[Tensor, EncoderDecoderCache]:
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    encoded = model.get_encoder()(**given)
    rest = {k: v for k, v in given.items() if k == "attention_mask"}
    logits, at = [], 0
    for size in sizes:
        asked = {"decoder_input_ids": ids[:, at : at + size], "cache": cache, "use_cache": True}
        logits.append(model(encoder_outputs=encoded, **rest, **asked).logits)
        at += size
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_any_split_gives_the_logits_of_one_forward(kind: str, implementation: str) -> None:
    plain, other, _ = pair(kind, implementation)
    given, ids = sources(kind, [17, 9, 2]), tokens(3, 16)
    with torch.no_grad():
        full = plain(**given, decoder_input_ids=ids, use_cache=False).logits
    for sizes in ([16], [12, 1, 2, 1], [1] * 3 + [13]):
        torch.testing.assert_close(in_calls(other, given, ids, sizes)[0], full, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3, "num_return_sequences": 2}, {"num_beams": 9}],
    ids=["greedy", "beam", "many beams"],
)
@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_generate_gives_the_same_tokens_and_scores(kind: str, options: dict[str, Any]) -> None:
    plain, other, _ = pair(kind)
    given = sources(kind, [2, 17, 8])
    asked = {"max_new_tokens": 9, "do_sample": False, "output_scores": True, "return_dict_in_generate": True} | options
    expected, got = plain.generate(**given, **asked), other.generate(**given, **asked)
    assert torch.equal(got.sequences, expected.sequences)
    if options:
        torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, rtol=1e-3, atol=1e-3)
    if kind == "whisper":  # it cuts the returned cache up into keys and values of its own layout
        for a, b in zip(got.cache.cross_attention_cache, expected.cache.cross_attention_cache, strict=True):
            torch.testing.assert_close(a[:2], b[:2], rtol=TOLERANCE, atol=TOLERANCE)
        return
    layers = got.cache.cross_attention_cache.layers
    assert len({id(layer.source) for layer in layers}) == 1
    assert layers[0].source.states.shape[0] == 3, "beams share the row of their source"


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_bytes_are_those_of_the_report(kind: str) -> None:
    plain, other, report = pair(kind)
    given = sources(kind, [24, 24])
    before, after = (in_calls(m, given, tokens(2, 4), [3, 1])[1].cross_attention_cache for m in (plain, other))
    assert cache_nbytes(before) == 2 * 24 * report.bytes_per_token_before == 2 * 24 * 3 * 2 * 32 * 4
    assert cache_nbytes(after) == 2 * 24 * report.bytes_per_token_after == 2 * 24 * 32 * 4


def test_a_source_is_a_view_of_what_the_caller_holds() -> None:
    given = torch.randn(3, 5, 4).repeat_interleave(2, dim=0)
    source = Source(given)
    assert source.beams == 2 and source.states.data_ptr() == given.data_ptr()
    source.select(torch.tensor([1, 1, 2, 3, 5, 4]))
    assert source.states.data_ptr() == given.data_ptr()
    source.select(torch.tensor([4, 4, 0]))
    assert source.beams == 1 and torch.equal(source.states, given[[4, 4, 0]])


def test_equal_sources_with_different_masks_are_kept_apart() -> None:
    plain, other, _ = pair("bart")
    ids = tokens(1, 6).expand(2, -1)
    states = torch.randn(1, 6, 32).expand(2, -1, -1).contiguous()
    mask = torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])
    given = {"encoder_outputs": (states,), "attention_mask": mask, "decoder_input_ids": ids}
    with torch.no_grad():
        expected, got = plain(**given).logits, other(**given).logits
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_attention_weights_and_gradients() -> None:
    plain, other, _ = pair("marian", "eager")
    given, ids = sources("marian", [7, 4]), tokens(2, 5)
    outputs = [m(**given, decoder_input_ids=ids, output_attentions=True, use_cache=True) for m in (plain, other)]
    for a, b in zip(*(o.cross_attentions for o in outputs), strict=True):
        torch.testing.assert_close(b, a, rtol=TOLERANCE, atol=TOLERANCE)
    for output in outputs:
        output.logits.square().mean().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), other.named_parameters(), strict=True):
        if a.grad is not None:
            got = torch.zeros_like(a) if b.grad is None else b.grad
            torch.testing.assert_close(got, a.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_undo_and_training_without_a_cache() -> None:
    plain, other, report = pair("whisper")
    given, ids = sources("whisper", [24]), tokens(1, 5)
    with torch.no_grad():
        a, b = (m(**given, decoder_input_ids=ids, use_cache=False).logits for m in (plain, other))
    assert torch.equal(a, b), "without a cache the original forward runs"
    report.undo()
    cache = in_calls(other, given, ids, [4, 1])[1]
    assert not any(isinstance(layer, SourceLayer) for layer in cache.cross_attention_cache.layers)
