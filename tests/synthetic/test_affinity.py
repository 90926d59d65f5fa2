"""Affinity: attention that is known gives the numbers that are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from qvattn.cli import main
from qvattn.data.synthetic.controlled import CLASSES, ControlledSpec, Sentence, controlled_sentences
from qvattn.errors import UserError
from qvattn.lab import affinity_text
from qvattn.lab.affinity import PLACES, Place, PlaceTally, _place, measure, questions, summary
from qvattn.train.recipe import read_recipe
from qvattn.train.run import run_training

SENTENCES = controlled_sentences(ControlledSpec(train=40), "train")


def tallied(place: Place, attend: str) -> dict:
    """What one head gives that puts everything on what it looks for (or spreads evenly)."""
    tally = PlaceTally()
    for sentence in SENTENCES:
        for question in questions(sentence, place):
            visible = len(question.column_class)
            weights = np.full(visible, 1 / visible)
            if attend != "evenly" and question.wanted[attend]:
                weights = np.zeros(visible)
                weights[question.wanted[attend]] = 1 / len(question.wanted[attend])
            tally.add(question, weights[None, None])
    return _place(tally)


@pytest.mark.parametrize("place", PLACES)
def test_attention_on_the_head_scores_one_and_even_attention_scores_chance(place: Place) -> None:
    (head,) = tallied(place, "head")["heads"]
    assert head["head"]["all"]["accuracy"] == head["head"]["all"]["mass"] == 1
    assert head["pairs"]["head fits"]["mass"] == head["pairs"]["head misfits"]["mass"] == 1
    assert head["pairs"]["rival fits"]["mass"] == 0
    even = tallied(place, "evenly")
    for relation in ("head", "modifiers"):
        one = even["heads"][0][relation]["all"]
        assert one["mass"] == pytest.approx(one["chance"])
    assert np.allclose(even["heads"][0]["table"], even["uniform_table"])


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_the_table_add_up(place: Place) -> None:
    result = tallied(place, "modifiers")
    table = np.array(result["heads"][0]["table"])
    assert table.shape == (6, 7) and np.allclose(table.sum(axis=1), 1)
    assert result["heads"][0]["modifiers"]["all"]["accuracy"] == 1


def test_the_table_shows_whom_modifiers_modify() -> None:
    table = np.array(tallied("encoder", "head")["heads"][0]["table"])
    assert table[CLASSES.index("adjective"), CLASSES.index("noun")] == 1
    assert table[CLASSES.index("adverb"), CLASSES.index("verb")] == 1


def test_partners_and_causality() -> None:
    (head,) = tallied("cross", "partner")["heads"]
    assert head["partner"]["all"]["accuracy"] == 1
    sentence: Sentence = SENTENCES[0]
    for question in questions(sentence, "decoder"):
        assert len(question.column_class) == question.row + 1
        for column in question.wanted["head"]:
            assert column <= question.row and sentence.target[column - 1] == sentence.target[question.word.head]


RECIPE = """
name: tiny <b>
task: translation
data: {corpus: controlled, max_tokens: 600, controlled: {train: 300, valid: 30, test: 0}}
model: {d_model: 16, d_ff: 16, n_heads: 2, encoder_layers: 1, decoder_layers: 2, attention: qv-ka}
train: {steps: 3, validate_every: 3, tensorboard: false}
"""


def test_a_trained_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = read_recipe(RECIPE, origin="test")
    for seed in (1, 2):
        run_training(recipe, tmp_path / f"run{seed}", seed=seed)
    page = tmp_path / "out" / "a.html"
    assert main(["affinity", str(tmp_path), "-o", str(page), "--sentences", "20"]) == 0
    assert "encoder" in capsys.readouterr().out
    runs = json.loads(page.with_suffix(".json").read_text())["runs"]
    assert [(run["seed"], run["sentences"]) for run in runs] == [(1, 20), (2, 20)]
    heads = runs[0]["places"]["decoder"]["heads"]
    assert [(head["layer"], head["index"]) for head in heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert np.allclose(np.array(heads[0]["table"]).sum(axis=1), 1)
    text = page.read_text()
    assert "tiny &lt;b&gt;" in text and "tiny <b>" not in text and "default-src &#x27;none" in text
    lines = summary(runs)
    assert {line.best_accuracy.count for line in lines} == {2}


def test_other_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "recipe.yaml").write_text("name: other\ndata: {corpus: verses}\n")
    assert main(["affinity", str(tmp_path)]) == 2
    assert "data.corpus='verses'" in capsys.readouterr().err
    with pytest.raises(Exception, match="not a run directory"):
        measure(tmp_path / "a" / "b" / "c")


NATURAL = """
name: natural
task: translation
data: {{corpus: files, {files}, vocab_size: 270, max_tokens: 300}}
model: {{d_model: 16, d_ff: 16, n_heads: 2, encoder_layers: 1, decoder_layers: 1, attention: qv}}
train: {{steps: 2, validate_every: 2, tensorboard: false}}
"""
LEXICON = {"a": "determiner", "the": "determiner", "dog": "noun", "dogs": "noun", "runs": "verb", "slowly": "adverb"}


def test_natural_text_by_a_tagger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes come from the tagger; a word's subwords count as one, and what is no word is a column of its own."""
    sentences = ["a dog runs slowly .", "the dogs run , slowly !", "dogs", "the dog ."] * 6
    for split in ("train", "valid"):
        for side in ("source", "target"):
            (tmp_path / f"{split}.{side}").write_text("\n".join(sentences) + "\n")
    files = ", ".join(f"{s}_{e}: {tmp_path}/{s}.{e}" for s in ("train", "valid") for e in ("source", "target"))
    run_training(read_recipe(NATURAL.format(files=files), origin="test"), tmp_path / "run", seed=1)

    def known(words: Sequence[str]) -> list[str]:
        return [LEXICON.get(word, "other") for word in words]

    monkeypatch.setattr(affinity_text, "tagger", lambda language: known)
    page = tmp_path / "a.html"
    assert main(["affinity", str(tmp_path / "run"), "--tags", "en,en", "-o", str(page)]) == 0
    (run,) = json.loads(page.with_suffix(".json").read_text())["runs"]
    for place in PLACES:
        queries = dict(zip(CLASSES, run["places"][place]["queries"], strict=True))
        assert queries == {"noun": 24, "adjective": 0, "verb": 6, "adverb": 12, "determiner": 18, "preposition": 0}
        table = np.array(run["places"][place]["heads"][0]["table"])
        assert np.allclose(table.sum(axis=1), [1, 0, 1, 1, 1, 0])
        assert run["places"][place]["heads"][0]["pairs"] == {}
    # "dogs" alone: its class, and the end of the sentence
    assert main(["affinity", str(tmp_path / "run"), "-o", str(page)]) == 2
    assert main(["affinity", str(tmp_path / "run"), "--tags", "en", "-o", str(page)]) == 2


def test_tags_of_a_language() -> None:
    assert [affinity_text.class_of(tag, "en") for tag in ("NN2", "AJ0", "VBB", "AT0", "PRP", "PUN", "PNP")] == [
        *("noun", "adjective", "verb", "determiner", "preposition", "other", "other")
    ]
    assert [affinity_text.class_of(tag, "de") for tag in ("NN", "ADJ(A)", "VV(FIN)", "APPRART", "ADV", "$.")] == [
        *("noun", "adjective", "verb", "preposition", "adverb", "other")
    ]
    with pytest.raises(UserError, match="allowed are en, de, nl"):
        affinity_text.tagger("xx")
