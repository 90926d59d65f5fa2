"""Faults that bit users of such libraries (CASES 1-4, 8-11), on whole models that decode with a cache.

"= full" is a forward over all tokens at once, without cache and padding, to 1e-5 in float32.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from qvattn.decode import LeanModel, beam_search, greedy
from qvattn.models import CausalLM, TranslationModel

from .small import COMBINATIONS, ENDS, FEW, ends, language, possible, prompts, sources, translation


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def full_logits(model: CausalLM, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids).logits
    return logits


def chunked(model: CausalLM, ids: Tensor, splits: list[int], cache: Any = None) -> Tensor:
    cache = model.new_cache(ids.shape[0], capacity=2) if cache is None else cache
    with torch.no_grad():
        return torch.cat([model(piece, cache=cache).logits for piece in ids.split(splits, dim=1)], dim=1)


@pytest.mark.parametrize(("variant", "position"), COMBINATIONS)
def test_1_cached_calls_of_any_length_equal_full(variant: str, position: str) -> None:
    model, ids = language(variant, position), torch.randint(3, 40, (2, 9))
    close(chunked(model, ids, [5, 1, 3]), full_logits(model, ids))


@pytest.mark.parametrize("variant", ["mha", "qv-ka", "mla"])
def test_1_chunked_prefill_of_any_chunk_size(variant: str) -> None:
    model, ids = language(variant, "rope"), torch.randint(3, 40, (1, 13))
    expected = full_logits(model, ids)
    for size in range(1, 14):
        close(chunked(model, ids, [min(size, 13 - start) for start in range(0, 13, size)]), expected)


@pytest.mark.parametrize("position", ["alibi", "t5"])
def test_2_position_biases_with_six_heads(position: str) -> None:
    model, ids = language("gqa", position, n_heads=6, d_model=24), torch.randint(3, 40, (2, 8))
    close(chunked(model, ids, [4, 1, 3]), full_logits(model, ids))


@pytest.mark.parametrize(("variant", "position"), FEW)
def test_3_left_padded_rows_equal_their_solo_runs(variant: str, position: str) -> None:
    model = language(variant, position)
    ids, mask = prompts((2, 6))
    cache, new = model.new_cache(2), torch.randint(3, 40, (2, 4))
    with torch.no_grad():
        steps = [model(ids, attention_mask=mask, cache=cache).logits[:, -1:]]
        for t in range(4):
            mask = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
            steps.append(model(new[:, t : t + 1], attention_mask=mask, cache=cache).logits)
    for row, n in enumerate((2, 6)):
        solo = full_logits(model, torch.cat((ids[row, -n:], new[row]))[None])
        close(torch.cat(steps, dim=1)[row], solo[0, n - 1 :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_4_a_row_of_padding_gives_finite_numbers_and_gradients(dtype: torch.dtype) -> None:
    model = language("qv", "agf+pcm-v").to(dtype)
    ids, mask = prompts((4, 1))
    mask[1] = 0
    out = model(ids, attention_mask=mask, labels=torch.where(mask > 0, ids, -100))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        assert torch.isfinite(model(ids, attention_mask=mask).logits).all()


@pytest.mark.parametrize("variant", ["mha", "qv-mla"])
def test_8_prefill_without_a_mask_is_causal(variant: str) -> None:
    model, ids = language(variant, "none"), torch.randint(3, 40, (1, 7))
    other = ids.clone()
    other[0, -1] = 3 + (other[0, -1] - 2) % 37
    assert torch.equal(full_logits(model, ids)[:, :-1], full_logits(model, other)[:, :-1])


@pytest.mark.parametrize(
    "variant", [v for v in ("mha", "qv", "qv-ka", "k-eq-v", "gta", "mla", "slim") if possible(v, "rope")]
)
def test_9_entries_are_immutable(variant: str) -> None:
    model, ids = language(variant, "rope"), torch.randint(3, 40, (1, 10))
    cache, seen = model.new_cache(1), []
    with torch.no_grad():
        model(ids[:, :5], cache=cache)
        for t in range(5, 10):
            seen.append([{n: s.clone() for n, s in cache.read(layer).items()} for layer in range(2)])
            model(ids[:, t : t + 1], cache=cache)
    for past in seen:
        for layer, streams in enumerate(past):
            for name, stream in streams.items():
                assert torch.equal(cache.read(layer)[name][:, :, : stream.shape[2]], stream), name


@pytest.mark.parametrize(("variant", "position"), FEW)
def test_10_beams_do_not_depend_on_their_neighbours(variant: str, position: str) -> None:
    model = LeanModel(ends(translation(variant, position)))
    ids, mask = sources((8, 2, 5))
    together = beam_search(model, ids, mask, beam=3, max_new_tokens=12)
    for row, n in enumerate((8, 2, 5)):
        alone = beam_search(model, ids[row : row + 1, :n], beam=3, max_new_tokens=12)
        length = alone.sequences.shape[2]
        assert torch.equal(together.sequences[row, :, :length], alone.sequences[0])
        assert not together.sequences[row, :, length:].any()
        close(together.scores[row], alone.scores[0])


@pytest.mark.parametrize("variant", ["mha", "qv-ka", "qv-mla", "slim"])
def test_11_each_beam_sees_its_own_whole_source(variant: str) -> None:
    model = translation(variant)
    ids, mask = sources((2, 8))
    target = torch.randint(3, 40, (4, 5))
    with torch.no_grad():
        together = model(ids, mask, decoder_input_ids=target).logits
        for row in range(4):
            n = (2, 8)[row // 2]
            alone = model(ids[row // 2 : row // 2 + 1, :n], decoder_input_ids=target[row : row + 1]).logits
            close(together[row : row + 1], alone)


def test_11_the_memory_of_a_source_is_stored_once_whatever_the_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask) = ends(translation("qv-ka")), sources((8, 2, 5))
    seen: set[tuple[int, ...]] = set()
    decode = TranslationModel.decode

    def watching(self: TranslationModel, ids: Tensor, positions: Tensor, memory: Any, *args: Any) -> Tensor:
        seen.update(
            (s.data_ptr(), s.shape[0], s.untyped_storage().nbytes()) for layer in memory.streams for s in layer.values()
        )
        return decode(self, ids, positions, memory, *args)

    monkeypatch.setattr(TranslationModel, "decode", watching)
    model.generate(input_ids=ids, attention_mask=mask, num_beams=4, max_new_tokens=6)
    assert len(seen) == 2 * 2, "one storage per stream and layer, the same at every step"
    assert {rows for _, rows, _ in seen} == {3}

    session = LeanModel(model).open(ids, mask, copies=4)
    assert session.memory is not None and session.rows == 12
    assert {s.shape[0] for layer in session.memory.streams for s in layer.values()} == {3}


def test_rollback_then_decode_again() -> None:
    model, ids = language("qv-ka", "rope"), torch.randint(3, 40, (1, 9))
    cache = model.new_cache(1)
    chunked(model, ids, [9], cache)
    cache.crop(4)
    other = torch.randint(3, 40, (1, 5))
    again = chunked(model, other, [1, 4], cache)
    close(again, full_logits(model, torch.cat((ids[:, :4], other), dim=1))[:, 4:])


def test_two_continuations_of_one_prefix() -> None:
    model, prefix = language("qv-ka-gqa", "t5"), torch.randint(3, 40, (2, 4))
    cache = model.new_cache(2)
    chunked(model, prefix, [4], cache)
    fork = cache.fork()
    one, two = torch.randint(3, 40, (2, 2, 3)).unbind(0)
    a, b = chunked(model, one, [1, 2], cache), chunked(model, two, [2, 1], fork)
    close(a, full_logits(model, torch.cat((prefix, one), dim=1))[:, 4:])
    close(b, full_logits(model, torch.cat((prefix, two), dim=1))[:, 4:])


@pytest.mark.parametrize("variant", ["mha", "qv-ka", "mla"])
def test_shared_streams_decode_as_in_full(variant: str) -> None:
    model, ids = language(variant, "rope", layers=4, share_every=2), torch.randint(3, 40, (2, 8))
    close(chunked(model, ids, [3, 1, 1, 3]), full_logits(model, ids))
    cache = model.new_cache(2)
    chunked(model, ids, [8], cache)
    assert (
        cache.nbytes
        == 2 * 8 * 4 * model.cache_elements_per_token()
        == 2 * 8 * 4 * 2 * model.cache_elements_per_token_layer()
    )


@pytest.mark.parametrize(("variant", "position"), FEW)
def test_mixed_lengths_decode_as_alone(variant: str, position: str) -> None:
    model = LeanModel(ends(language(variant, position)))
    ids, mask = prompts((2, 6, 4))
    together = greedy(model, ids, mask, max_new_tokens=9)[:, 6:]
    for row, n in enumerate((2, 6, 4)):
        alone = greedy(model, ids[row : row + 1, -n:], max_new_tokens=9)[0, n:]
        assert torch.equal(together[row, : len(alone)], alone)
        assert not together[row, len(alone) :].any()


def test_random_splits_with_padding_everywhere() -> None:
    draw = random.Random(0)
    model = language("qv-ka", "kerple")
    for _ in range(5):
        ids, mask = prompts((7, 3, 5), seed=draw.randint(0, 99))
        cache, parts, start = model.new_cache(3), [], 0
        while start < 7:
            size = draw.randint(1, 7 - start)
            with torch.no_grad():
                parts.append(
                    model(ids[:, start : start + size], attention_mask=mask[:, : start + size], cache=cache).logits
                )
            start += size
        for row, n in enumerate((7, 3, 5)):
            close(torch.cat(parts, dim=1)[row, 7 - n :], full_logits(model, ids[row : row + 1, 7 - n :])[0])


def test_some_rows_end_early() -> None:
    rows = greedy(ends(language("mha", "rope")), *prompts((5, 2, 3, 6)), max_new_tokens=30)
    ended = torch.isin(rows, torch.tensor(ENDS)).any(dim=1)
    assert ended.any(), "the other tests rely on rows that end"
