"""Lean caches of decoder-only models: the logits, tokens and scores of the unmodified model, in fewer bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from qvattn.hf import lean
from qvattn.hf.exact.layers import LeanLayer, cache_nbytes

from .families import CAUSAL, VOCABULARY, causal

TOLERANCE = 1e-4
FAMILIES = sorted(CAUSAL)


def pair(name: str, implementation: str = "sdpa", **changes: Any) -> tuple[Any, Any]:
    """The same model twice, the second one lean."""
    plain = causal(name, implementation, **changes)
    other = copy.deepcopy(plain)
    lean(other)
    return plain, other


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Left padding: row b keeps its last lengths[b] tokens."""
    T = rows.shape[1]
    mask = torch.arange(T)[None] >= T - torch.tensor(lengths)[:, None]
    return rows.masked_fill(~mask, 0), mask.long()


@torch.no_grad()
def in_calls(model: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> tuple[Tensor, DynamicCache]:
    """Logits of `ids` fed in calls of the given sizes."""
    cache = DynamicCache(config=model.config)
    at, logits = 0, []
    for size in sizes:
        given: dict[str, Any] = {"input_ids": ids[:, at : at + size], "cache": cache, "use_cache": True}
        if mask is not None:
            given["attention_mask"] = mask[:, : at + size]
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            given["position_ids"] = positions[:, at : at + size]
        logits.append(model(**given).logits)
        at += size
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_any_split_gives_the_logits_of_one_forward(name: str, implementation: str) -> None:
    plain, other = pair(name, implementation)
    ids = tokens(2, 44)
    with torch.no_grad():
        full = plain(input_ids=ids, use_cache=False).logits
    assert full.std() > 0.1
    for sizes in ([44], [40, 1, 1, 1, 1], [20, 3, 1, 20], [1, 17, 1, 25]):
        torch.testing.assert_close(in_calls(other, ids, sizes)[0], full, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_left_padding_equals_the_unmodified_model(name: str) -> None:
    plain, other = pair(name)
    ids, mask = padded(tokens(3, 30), [30, 22, 5])
    sizes = [24, 1, 3, 1, 1]
    real = mask.bool()
    expected, got = in_calls(plain, ids, sizes, mask)[0][real], in_calls(other, ids, sizes, mask)[0][real]
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
    alone = in_calls(other, ids[2:, 25:], [3, 1, 1])[0][0]
    torch.testing.assert_close(in_calls(other, ids, sizes, mask)[0][2, 25:], alone, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beam"])
@pytest.mark.parametrize("name", FAMILIES)
def test_generate_gives_the_same_tokens_and_scores(name: str, options: dict[str, Any]) -> None:
    plain, other = pair(name)
    ids, mask = padded(tokens(3, 20), [20, 12, 4])
    asked = {"max_new_tokens": 12, "do_sample": False, "output_scores": True, "return_dict_in_generate": True} | options
    expected = plain.generate(ids, attention_mask=mask, **asked)
    got = other.generate(ids, attention_mask=mask, **asked)
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.scores, expected.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_are_those_of_the_report(name: str) -> None:
    plain, other = causal(name), causal(name)
    report = lean(other)
    ids = tokens(2, 300)
    before, after = in_calls(plain, ids, [299, 1])[1], in_calls(other, ids, [299, 1])[1]
    saved = report.bytes_per_token_before - report.bytes_per_token_after
    assert cache_nbytes(before) - cache_nbytes(after) == 600 * saved
    if all(layer.lean for layer in report.layers):
        assert cache_nbytes(after) == 600 * report.bytes_per_token_after
    own = [layer for layer in after.layers if isinstance(layer, LeanLayer)]
    assert own and all(layer.nbytes <= layer.allocated_nbytes <= 1.4 * layer.nbytes for layer in own)


@pytest.mark.parametrize("name", FAMILIES)
def test_undo_puts_the_model_back(name: str) -> None:
    plain, other = causal(name), causal(name)
    ids = tokens(1, 9)
    with lean(other):
        assert isinstance(in_calls(other, ids, [9])[1].layers[1], LeanLayer)
    assert [type(m) for m in other.modules()] == [type(m) for m in plain.modules()]
    logits, cache = in_calls(other, ids, [8, 1])
    assert not any(isinstance(layer, LeanLayer) for layer in cache.layers)
    assert torch.equal(logits, in_calls(plain, ids, [8, 1])[0])
    assert other.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_one_forward_are_those_of_the_unmodified_model(name: str) -> None:
    plain, other = pair(name)
    ids = tokens(2, 24)
    for model in (plain, other):
        model(input_ids=ids, labels=ids).loss.backward()
    for (parameter, a), (_, b) in zip(plain.named_parameters(), other.named_parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-4, msg=parameter)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_weights_are_those_of_eager(name: str) -> None:
    plain, other = pair(name, "eager")
    ids = tokens(2, 20)
    with torch.no_grad():
        expected = plain(input_ids=ids, output_attentions=True).attentions
        got = other(input_ids=ids, output_attentions=True).attentions
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_rollback_and_refilling(name: str) -> None:
    _, other = pair(name, **({"sliding_window": 64} if "gemma" in name else {}))
    ids = tokens(2, 30)
    expected = in_calls(other, ids, [30])[0]
    with torch.no_grad():
        cache = copy.deepcopy(in_calls(other, ids[:, :20], [20])[1])
        other(input_ids=tokens(2, 3, seed=9), cache=cache)
        cache.crop(-3)
        again = other(input_ids=ids[:, 20:], cache=cache).logits
    torch.testing.assert_close(again, expected[:, 20:], rtol=TOLERANCE, atol=TOLERANCE)
