"""Affinity: attention that is known gives the numbers that are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qvattn.cli import main
from qvattn.data.synthetic.controlled import CLASSES, ControlledSpec, Sentence, controlled_sentences
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
