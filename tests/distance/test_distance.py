"""What is measured against distance, held to loops over the weights that models themselves return."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qvattn.cli import main
from qvattn.hf import adopt
from qvattn.lab.check.subject import Sample, Subject
from qvattn.lab.distance import measure, summary, watched
from qvattn.lab.distance_subjects import blocks
from qvattn.models import CausalLM, CausalLMConfig, TranslationConfig, TranslationModel, initialise
from qvattn.positions.bias import alibi_slopes
from qvattn.variants import VARIANTS

WIDTHS = {"d_model": 16, "d_ff": 16, "n_heads": 2}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 30, (1, length), generator=torch.Generator().manual_seed(seed))


def language_model(**fields: object) -> Subject:
    model = CausalLM(CausalLMConfig(vocab_size=32, layers=2, **{**WIDTHS, **fields}))
    initialise(model, 1)
    return Subject(model=model, samples=[Sample(ids=ids(n, n)) for n in (14, 20, 20)])


def translation(position: str) -> Subject:
    model = TranslationModel(
        TranslationConfig(
            source_vocab_size=32, target_vocab_size=32, encoder_layers=1, decoder_layers=1, position=position, **WIDTHS
        )
    )
    initialise(model, 1)
    samples = [Sample(ids=ids(n, n), source=ids(n + 2, 3 * n)) for n in (14, 20)]
    return Subject(model=model, samples=samples)


def mean_at(weights: list[torch.Tensor], distance: int, left_out: int) -> float:
    """Mean of a[m, m - distance] over all (T, T) weights, but for the query and key that are left out."""
    found = []
    for a in weights:
        size = a.shape[0]
        skipped = left_out % size
        pairs = [(m, m - distance) for m in range(size) if 0 <= m - distance < size]
        found += [float(a[m, n]) for m, n in pairs if skipped not in (m, n)]
    return float(np.mean(found))


def test_attention_of_a_language_model_at_every_distance() -> None:
    subject = language_model(position="rope")
    found = measure(subject)["places"]["decoder"]
    per_layer = [subject.model(input_ids=s.ids, output_attentions=True).attentions for s in subject.samples]
    for head in found["heads"]:
        own = [layers[head["layer"]][0, head["index"]].detach() for layers in per_layer]
        one = head["past"]
        assert one["distance"] == list(range(19))  # the first key is left out
        expected = [mean_at(own, d, left_out=0) for d in one["distance"]]
        np.testing.assert_allclose(one["attention"], expected, rtol=1e-4)
        rest = np.mean([float(a[m, 0]) for a in own for m in range(1, len(a))])
        assert head["left_out"] == pytest.approx(rest, rel=1e-4)
        # shares of queries with four distances and more, each adding to one
        shares = [[(a[m, 1:m] / a[m, 1:m].sum()).flip(0) for m in range(5, len(a))] for a in own]
        flat = [share for sentence in shares for share in sentence]
        at = [np.mean([float(s[d]) for s in flat if len(s) > d]) for d in range(len(one["share"]))]
        np.testing.assert_allclose(one["share"], at, rtol=1e-4)
        assert one["fit"]["ratio"]["count"] == 3


def test_both_directions_of_an_encoder() -> None:
    subject = translation("t5")
    places = measure(subject)["places"]
    assert places["decoder"]["left_out"] == "first" and places["encoder"]["left_out"] == "last"
    assert "future" not in places["decoder"]["heads"][0]
    outputs = [
        subject.model(input_ids=s.source, decoder_input_ids=s.ids, output_attentions=True) for s in subject.samples
    ]
    for head in places["encoder"]["heads"]:
        own = [out.encoder_attentions[0][0, head["index"]].detach() for out in outputs]
        for side, sign in (("past", 1), ("future", -1)):
            one = head[side]
            expected = [mean_at(own, sign * d, left_out=-1) for d in one["distance"]]
            np.testing.assert_allclose(one["attention"], expected, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_are_what_the_softmax_saw(variant: str) -> None:
    """Without position every variant's weights are the softmax of the scores, and cosines lie within one."""
    subject = language_model(attention=variant, position="none")
    (_, _, weights, scores, cosines) = next(watched(subject, 1))
    hidden = np.triu(np.ones(weights.shape[-2:], dtype=bool), 1)
    masked = torch.from_numpy(np.where(hidden, -np.inf, scores)).softmax(-1)
    np.testing.assert_allclose(masked.numpy(), weights, atol=1e-6)
    assert np.abs(cosines).max() <= 1 + 1e-9
    assert np.all(np.sign(cosines) == np.sign(scores))


def test_alibi_alone_is_found_to_be_exponential() -> None:
    """Queries of zero leave the bias: weights exp(-slope d), whatever the length."""
    subject = language_model(position="alibi")
    with torch.no_grad():
        for block in subject.model.decoder_stack.blocks():
            block.self_attn.variant.q_proj.weight.zero_()
    for head in measure(subject)["places"]["decoder"]["heads"]:
        one = head["past"]["fit"]
        assert one["rate"] == pytest.approx(alibi_slopes(2)[head["index"]], abs=1e-4)
        assert one["ratio"]["mean"] < 0 and one["gap"]["exponential"] < 1e-4
        # three sentences cannot tell the flat slope's decay from a power law; the steep one's they can
        assert one["better"] == "exponential" if head["index"] == 0 else one["better"] != "power"


def test_learned_exponents_by_direction() -> None:
    result = measure(translation("agf+pcm-v"))
    encoder = result["places"]["encoder"]["heads"][1]["agf"]
    assert encoder == pytest.approx({"past": 1.0, "future": 1.0}, abs=1e-5)
    assert result["places"]["decoder"]["heads"][0]["agf"] == pytest.approx({"past": 0.05}, abs=1e-5)
    lines = summary(result)
    assert [(line.place, line.side) for line in lines] == [
        ("encoder", "past"),
        ("encoder", "future"),
        ("decoder", "past"),
    ]
    assert all(line.power + line.exponential + line.open == 2 for line in lines)
    assert lines[0].agf == pytest.approx((0.05, 0.525, 1.0), abs=1e-5)


def test_a_hugging_face_model_against_its_own_weights() -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    theirs = LlamaForCausalLM(config).eval()
    ours = adopt(theirs)

    class Letters:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [3 + ord(letter) % 37 for letter in text]

    ours.tokenizer = Letters()
    samples = blocks(ours, ["In the beginning was the word, " * 4], sentences=3, length=24)
    found = measure(Subject(model=ours, samples=samples))["places"]["decoder"]["heads"]
    assert len(found) == 8
    with torch.no_grad():
        weights = [theirs(sample.ids, output_attentions=True).attentions for sample in samples]
    for head in found:
        own = [layers[head["layer"]][0, head["index"]] for layers in weights]
        expected = [mean_at(own, d, left_out=0) for d in head["past"]["distance"]]
        np.testing.assert_allclose(head["past"]["attention"], expected, rtol=1e-3)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], text_run: Path) -> None:
    page = tmp_path / "out" / "distance.html"
    assert (
        main(["distance", str(text_run.parent), "-o", str(page), "--sentences", "6", "--length", "32", "--json"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert printed["runs"][0]["name"] == "tiny, seed 1"
    text = page.read_text(encoding="utf-8")
    assert "tiny, seed 1" in text and "https://" not in text.split("<script>")[0]
    assert main(["distance", str(text_run), "-o", str(page), "--sentences", "6", "--length", "32"]) == 0
    assert "decoder" in capsys.readouterr().out
    assert main(["distance", str(tmp_path / "nothing"), "-o", str(page)]) == 2
    assert main(["distance", str(text_run), "-o", str(tmp_path / "x.json")]) == 2
