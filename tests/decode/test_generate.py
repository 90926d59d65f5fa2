"""Hugging Face `generate()` over our cache: every mode, its defaults, and that our loops give the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    TextStreamer,
    pipeline,
)

from qvattn import StreamCache, UserError
from qvattn.data.tokenizer import train_tokenizer
from qvattn.decode import beam_search, greedy, sample
from qvattn.models.generation import GenerationCache

from .small import COMBINATIONS, ENDS, FEW, ends, language, prompts, sources, translation, until_end

PICKED = [c for c in COMBINATIONS if c in FEW and (c[1] == "agf+pcm-v" or c[0] in ("mha", "qv-ka"))]


@pytest.mark.parametrize(("variant", "position"), PICKED)
def test_greedy_is_token_identical(variant: str, position: str) -> None:
    model, (ids, mask) = ends(translation(variant, position)), sources((8, 2, 5, 3))
    cached = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=15)
    uncached = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=15, use_cache=False)
    assert torch.equal(cached, uncached)
    assert torch.equal(cached, greedy(model, ids, mask, max_new_tokens=15))


@pytest.mark.parametrize(("variant", "position"), PICKED)
def test_greedy_language_model_is_token_identical(variant: str, position: str) -> None:
    model, (ids, mask) = ends(language(variant, position)), prompts((6, 2, 4))
    cached = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12)
    uncached = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, use_cache=False)
    assert torch.equal(cached, uncached)
    assert torch.equal(cached, greedy(model, ids, mask, max_new_tokens=12))


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("new_tokens", [1, 6, 14])
def test_beams_have_the_same_hypotheses_and_scores(early_stopping: Any, length_penalty: float, new_tokens: int) -> None:
    model, (ids, mask) = ends(translation("qv-ka")), sources((8, 2, 5, 3))
    theirs = model.generate(
        input_ids=ids,
        attention_mask=mask,
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=new_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        output_scores=True,
        return_dict_in_generate=True,
    )
    ours = beam_search(
        model,
        ids,
        mask,
        beam=4,
        max_new_tokens=new_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    assert torch.equal(until_end(ours.sequences.flatten(0, 1)), until_end(theirs.sequences))
    torch.testing.assert_close(ours.scores.flatten(), theirs.sequences_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "position"), [("mha", "rope"), ("qv-gqa", "alibi"), ("mla", "rope"), ("slim", "t5")]
)
def test_beams_of_a_language_model(variant: str, position: str) -> None:
    model, (ids, mask) = ends(language(variant, position)), prompts((6, 2, 4))
    theirs = model.generate(
        input_ids=ids, attention_mask=mask, num_beams=3, num_return_sequences=3, max_new_tokens=10,
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    ours = beam_search(model, ids, mask, beam=3, max_new_tokens=10)
    assert torch.equal(until_end(ours.sequences[:, :, 6:].flatten(0, 1)), until_end(theirs.sequences[:, 6:]))
    torch.testing.assert_close(ours.scores.flatten(), theirs.sequences_scores, rtol=1e-4, atol=1e-4)


def test_sampling_repeats_with_its_seed_and_temperature_0_is_greedy() -> None:
    model, (ids, mask) = translation("gqa"), sources()
    one, two, other = (sample(model, ids, mask, seed=s, copies=2, max_new_tokens=8) for s in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other) and one.shape[0] == 6
    assert torch.equal(
        sample(model, ids, mask, temperature=0, max_new_tokens=8), greedy(model, ids, mask, max_new_tokens=8)
    )
    torch.manual_seed(5)
    theirs = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, num_return_sequences=2, max_new_tokens=8
    )
    assert theirs.shape[0] == 6


def test_top_k_and_top_p_allow_what_transformers_allows() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    from qvattn.decode.sample import allowed

    logits = torch.randn(5, 30)
    ids = torch.zeros(5, 1, dtype=torch.long)
    for k in (1, 3, 30):
        assert torch.equal(allowed(logits, k, None), TopKLogitsWarper(k)(ids, logits))
    for p in (0.1, 0.5, 0.99):
        assert torch.equal(allowed(logits, None, p), TopPLogitsWarper(p)(ids, logits))


def test_beam_sampling_and_returned_sequences() -> None:
    model, (ids, mask) = translation("qv"), sources()
    rows = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, num_beams=3, num_return_sequences=2, max_new_tokens=6
    )
    assert rows.shape[0] == 6


@pytest.mark.parametrize("beams", [1, 3])
def test_attention_weights_in_every_mode(beams: int) -> None:
    model, (ids, mask) = translation("qv-ka"), sources((8, 2))
    out = model.generate(
        input_ids=ids, attention_mask=mask, num_beams=beams, max_new_tokens=4, return_dict_in_generate=True,
        output_attentions=True, output_hidden_states=True,
    )  # fmt: skip
    plain = model.generate(input_ids=ids, attention_mask=mask, num_beams=beams, max_new_tokens=4)
    assert torch.equal(out.sequences, plain)
    assert [a.shape for a in out.encoder_attentions] == [(2, 4, 8, 8)]
    assert len(out.encoder_hidden_states) == 2
    for t, (own, cross, hidden) in enumerate(
        zip(out.decoder_attentions, out.cross_attentions, out.decoder_hidden_states, strict=True)
    ):
        assert [a.shape for a in own] == [(2 * beams, 4, 1, t + 1)] * 2
        assert [a.shape for a in cross] == [(2 * beams, 4, 1, 8)] * 2
        assert [h.shape for h in hidden] == [(2 * beams, 1, 16)] * 3
        for a in (*own, *cross):
            torch.testing.assert_close(a.sum(-1), torch.ones(a.shape[:-1]))
        assert not cross[0][beams:, :, :, 2:].any(), "padding of the second source is not attended to"


def test_attention_weights_of_a_language_model_and_without_cache() -> None:
    model, (ids, mask) = language("mha", "rope"), prompts((5, 3))
    for use_cache in (True, False):
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True,
            output_attentions=True, output_hidden_states=True, use_cache=use_cache,
        )  # fmt: skip
        assert out.attentions[2][0].shape == (2, 4, 1 if use_cache else 7, 7)
        assert len(out.hidden_states[2]) == 3
        assert not out.attentions[2][1][1, :, -1, :2].any()


def test_a_returned_cache_is_continued() -> None:
    model, (ids, mask) = language("qv-ka", "rope"), prompts((6, 2))
    whole = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8)
    half = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True)
    assert isinstance(half.cache, GenerationCache) and half.cache.get_seq_length() == 9
    seen = torch.cat((mask, mask.new_ones(2, 4)), dim=1)
    again = model.generate(input_ids=half.sequences, attention_mask=seen, max_new_tokens=4, cache=half.cache)
    assert torch.equal(again, whole)


def test_a_stream_cache_of_ones_own_is_used() -> None:
    model, (ids, mask) = language("qv", "rope"), prompts((6, 6))
    cache = model.new_cache(2)
    out = model.generate(input_ids=ids, max_new_tokens=5, cache=cache)
    assert cache.length == 10
    assert torch.equal(out, model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5))
    assert cache.nbytes == 2 * 10 * 4 * model.cache_elements_per_token()


def test_foreign_caches_are_refused() -> None:
    model, (ids, _) = language(), prompts((4, 4))
    with pytest.raises(UserError, match=r"cache of type DynamicCache.*StreamCache"):
        model(ids, cache=DynamicCache())
    with pytest.raises(UserError, match="cache_implementation='static'"):
        model.generate(input_ids=ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(UserError, match="ids have 2 rows, the cache has 3"):
        model(ids, cache=model.new_cache(3))


def test_chunked_prefill_and_prompt_lookup_and_decoder_prompts() -> None:
    model, (ids, mask) = language("qv-ka", "t5"), prompts((6, 2))
    whole = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6)
    chunks = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, prefill_chunk_size=2)
    assert torch.equal(whole, chunks)
    looked = model.generate(input_ids=ids[:1], attention_mask=mask[:1], max_new_tokens=6, prompt_lookup_num_tokens=3)
    assert torch.equal(looked, whole[:1])
    translator, (src, src_mask) = translation(), sources()
    start = translator.generate(input_ids=src, attention_mask=src_mask, max_new_tokens=8)
    forced = translator.generate(
        input_ids=src, attention_mask=src_mask, decoder_input_ids=start[:, :4], max_new_tokens=5
    )
    assert torch.equal(forced, start)


def test_defaults_are_right_and_saved(tmp_path: Path) -> None:
    model = translation(eos_token_id=5, decoder_start_token_id=6)
    config = model.generation_config
    assert (config.eos_token_id, config.pad_token_id, config.decoder_start_token_id) == (5, 0, 6)
    assert config.suppress_tokens == [0]
    model.save_pretrained(tmp_path / "t")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t")
    assert GenerationConfig.from_pretrained(tmp_path / "t").suppress_tokens == [0]
    ids, mask = sources()
    a = model.generate(input_ids=ids, attention_mask=mask, num_beams=2, max_new_tokens=7)
    assert torch.equal(a, loaded.generate(input_ids=ids, attention_mask=mask, num_beams=2, max_new_tokens=7))
    assert (a[:, 0] == 6).all()
    lm = language()
    lm.save_pretrained(tmp_path / "l")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "l")
    assert torch.equal(again.generate(ids, max_new_tokens=3), lm.generate(ids, max_new_tokens=3))


def test_generation_is_not_cut_at_transformers_default_of_20_tokens(recwarn: pytest.WarningsRecorder) -> None:
    model, (ids, mask) = translation(), sources((4,))
    model.generation_config.eos_token_id = None
    assert model.generate(input_ids=ids, attention_mask=mask).shape[1] == 257
    assert not [w for w in recwarn if "max_length" in str(w.message)]


def test_streaming_and_the_text_generation_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer(["a small text for a small model", "one more line of text"], 300)
    model = language("qv-ka", "rope", vocab_size=len(tokenizer))
    ids = tokenizer("a small", return_tensors="pt")["input_ids"][:, :-1]
    rows = model.generate(ids, max_new_tokens=5, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == tokenizer.decode(rows[0, ids.shape[1] :]).strip()
    tokenizer.padding_side = "left"
    written = pipeline("text-generation", model=model, tokenizer=tokenizer)(
        ["a small", "one more line"], max_new_tokens=4, do_sample=False, batch_size=2
    )
    assert len(written) == 2 and written[1][0]["generated_text"].startswith("one more line")


def test_use_cache_in_a_forward_pass() -> None:
    model, (ids, _) = language(), prompts((4, 4))
    with torch.no_grad():
        out = model(ids, use_cache=True)
    assert isinstance(out.cache, StreamCache) and out.cache.length == 4 and out.past_key_values is out.cache
    assert model(ids, use_cache=True).cache is None, "gradients are recorded: entries would be cut from the graph"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, ids: greedy(m, ids, max_new_tokens=0), "max_new_tokens=0"),
        (lambda m, ids: beam_search(m, ids, beam=0), "beam=0"),
        (lambda m, ids: beam_search(m, ids, early_stopping="maybe"), "early_stopping='maybe'"),
        (lambda m, ids: sample(m, ids, temperature=-1), "temperature=-1"),
        (lambda m, ids: sample(m, ids, top_p=0.0), "top_p=0.0"),
        (lambda m, ids: sample(m, ids, top_k=0), "top_k=0"),
        (lambda m, ids: sample(m, ids, copies=0), "copies=0"),
        (lambda m, ids: greedy(m, ids[0]), "input_ids has shape"),
        (lambda m, ids: greedy(m, ids, torch.ones(1, 1)), "attention_mask has shape"),
        (lambda m, ids: greedy(torch.nn.Linear(1, 1), ids), "model of type Linear"),
        (lambda m, ids: greedy(language(), ids, (torch.arange(8) < 5).expand(3, 8)), "pad prompts on the left"),
    ],
)
def test_bad_requests_are_named(call: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call(translation(), sources()[0])


def test_rows_may_have_limits_of_their_own() -> None:
    model, (ids, mask) = translation(), sources((8, 2, 5))
    whole = greedy(model, ids, mask, max_new_tokens=9)
    cut = greedy(model, ids, mask, max_new_tokens=9, limits=torch.tensor([9, 1, 4]))
    for row, n in enumerate((9, 1, 4)):
        assert torch.equal(cut[row, : 1 + n], whole[row, : 1 + n]) and not cut[row, 1 + n :].any()
    with pytest.raises(UserError, match="limits of shape"):
        greedy(model, ids, mask, limits=torch.tensor([1, 0, 2]))


def test_ends_are_several_tokens() -> None:
    assert ends(translation()).generation_config.eos_token_id == ENDS
