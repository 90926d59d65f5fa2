"""Diffusion: heads that are known give the numbers that are known, and no number depends on who carries a factor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import mannwhitneyu

from qvattn.cli import main
from qvattn.data.synthetic.controlled import NO_HEAD, ControlledSpec, controlled_sentences
from qvattn.errors import UserError
from qvattn.lab.affinity import PLACES, open_run, watched
from qvattn.lab.diffusion import Separation, best_head, effective_rank, spread, words_asked_for
from qvattn.lab.diffusion_features import GROUPS, Decomposition, describe
from qvattn.lab.diffusion_summary import choose_baseline, lines, predictions
from qvattn.train.recipe import read_recipe
from qvattn.train.run import run_training

SPEC = ControlledSpec(train=300, genders=7)
SENTENCES = controlled_sentences(SPEC, "train")


def test_features_follow_the_grammar() -> None:
    for sentence in SENTENCES:
        for words in (sentence.source, sentence.target):
            rows = describe(words, SPEC)
            for word, row in zip(words, rows, strict=True):
                features = dict(zip(GROUPS, row, strict=False))
                assert features["class"] == word.word_class and features["word"] == word.word
                assert features["affinity"] == word.group
                if word.head == NO_HEAD:
                    assert features["head"] == "" and word.word_class == "verb"
                    continue
                head = dict(zip(GROUPS, rows[word.head], strict=False))
                assert features["head"] == head["word"]
                if word.word_class in ("adjective", "determiner") and features["gender"]:
                    assert features["gender"] == head["gender"] and features["number"] == head["number"] != ""
        target = describe(sentence.target, SPEC)
        assert all(row[2] for row in target if row[0] in ("noun", "adjective", "determiner"))


@pytest.fixture(scope="module")
def rows() -> list[tuple[object, ...]]:
    return [row for sentence in SENTENCES[:80] for row in describe(sentence.source, SPEC)]


def test_parts_of_a_covariance_add_up(rows: list[tuple[object, ...]]) -> None:
    vectors = np.random.default_rng(0).normal(size=(len(rows), 5)) + 3
    parts = Decomposition(rows).covariances(vectors)
    assert parts.shape == (len(GROUPS), 5, 5)
    assert np.allclose(parts.sum(axis=0), np.cov(vectors.T, bias=True))
    assert all(np.linalg.eigvalsh(part).min() > -1e-9 for part in parts)


@pytest.mark.parametrize("group", ["class", "number", "affinity", "word", "position"])
def test_what_one_group_decides_is_counted_there(rows: list[tuple[object, ...]], group: str) -> None:
    """Vectors that only tell this group apart: it, and groups before it, explain them wholly."""
    index = GROUPS.index(group)
    names, codes = np.unique([str(row[index]) for row in rows], return_inverse=True)
    vectors = np.random.default_rng(1).normal(size=(len(names), 4))[codes]
    sizes = np.trace(Decomposition(rows).covariances(vectors), axis1=1, axis2=2)
    assert sizes[index + 1 :].sum() < 1e-9 * sizes.sum()
    assert sizes[index] > 0.02 * sizes.sum()
    asked = spread(np.ones((3, 4)), Decomposition(rows).covariances(vectors))
    assert sum(asked["shares"][: index + 1]) == pytest.approx(1)
    if group == "class":
        assert asked["groups"] == pytest.approx(1)


def test_nothing_depends_on_who_carries_a_factor(rows: list[tuple[object, ...]]) -> None:
    draw = np.random.default_rng(2)
    q, k, factor = draw.normal(size=(50, 4)), draw.normal(size=(len(rows), 4)), draw.normal(size=(4, 4))
    words = [str(row[GROUPS.index("word")]) for row in rows]
    before = spread(q, Decomposition(rows).covariances(k))
    other_q, other_k = q @ factor, k @ np.linalg.inv(factor).T
    after = spread(other_q, Decomposition(rows).covariances(other_k))
    assert np.allclose(before["shares"], after["shares"])
    assert before["groups"] == pytest.approx(after["groups"]) and before["rank"] == pytest.approx(after["rank"])
    assert words_asked_for(q, k, words, 0.5) == pytest.approx(words_asked_for(other_q, other_k, words, 0.5))


def test_effective_rank_and_words_asked_for() -> None:
    assert effective_rank(np.ones(7)) == pytest.approx(7)
    assert effective_rank(np.array([3.0, 0, 0])) == pytest.approx(1)
    assert effective_rank(np.zeros(3)) == 0
    keys, words = np.eye(4), ["a", "b", "c", "d"]
    assert words_asked_for(np.zeros((2, 4)), keys, words, 1.0) == pytest.approx(4)
    assert words_asked_for(np.array([[90.0, 90, 0, 0]]), keys, words, 1.0) == pytest.approx(2)
    # a word that stands there twice counts once, by its mean key
    assert words_asked_for(np.zeros((1, 4)), keys, ["a", "a", "b", "b"], 1.0) == pytest.approx(2)


def test_separation_against_known_scores() -> None:
    draw = np.random.default_rng(3)
    one, deviations = Separation(), {"right": [], "other": []}
    aucs, margins = [], []
    for _ in range(60):
        scores = draw.normal(size=8)
        scores[2] += 1.0
        one.add(softmax(scores)[None, None], right=[2], others=[0, 1, 3, 4, 5, 6], rivals=[3, 4])
        words = scores[:7] - scores[:7].mean()
        deviations["right"].append(words[2])
        deviations["other"] += [words[i] for i in (0, 1, 3, 4, 5, 6)]
        aucs.append(mannwhitneyu([scores[2]], scores[[0, 1, 3, 4, 5, 6]]).statistic / 6)
        margins.append(scores[2] - max(scores[i] for i in (0, 1, 3, 4, 5, 6)))
    found = one.of(0, 0)
    assert found["count"] == 60 and found["auc"] == pytest.approx(np.mean(aucs))
    assert found["margin_before"] == pytest.approx(np.mean(margins))
    spread_of = np.sqrt((np.var(deviations["right"]) + np.var(deviations["other"])) / 2)
    expected = (np.mean(deviations["right"]) - np.mean(deviations["other"])) / spread_of
    assert found["d_prime_before"] == pytest.approx(expected)


RECIPE = """
name: "{name} <b>"
task: translation
data: {{corpus: controlled, max_tokens: 600, controlled: {{train: 300, valid: 30, test: 0}}}}
model: {{d_model: 16, d_ff: 16, n_heads: 2, encoder_layers: 1, decoder_layers: 2, attention: {name}}}
train: {{steps: 3, validate_every: 3, tensorboard: false}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name in ("mha", "qv", "qv-ka"):
        for seed in (1, 2):
            run_training(read_recipe(RECIPE.format(name=name), origin="test"), root / f"{name}{seed}", seed=seed)
    return root


def test_views_are_what_attention_used(runs: Path) -> None:
    for name in ("mha", "qv", "qv-ka"):
        model, recipe, tokenizers = open_run(runs / f"{name}1")
        sentence, views = next(iter(watched(model, recipe, tokenizers, 3)))
        for place in PLACES:
            view = views[place]
            scores = view.scale * view.queries @ view.keys.swapaxes(-1, -2)
            if place == "decoder":
                scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
            assert np.allclose(softmax(scores, axis=-1), view.weights, atol=1e-5)
            assert view.keys_are_values == (name == "qv")
        assert views["encoder"].weights.shape[-1] == len(sentence.source) + 1


def test_the_command(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out" / "d.html"
    assert main(["diffusion", str(runs), "-o", str(page), "--sentences", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(page.with_suffix(".json").read_text())
    assert found["baseline"] == "mha <b>" and str(runs) not in json.dumps(found)
    measured = found["runs"]
    sides = {run["name"]: run["matched_side"]["cross"] for run in measured}
    assert sides == {"mha <b>": "key", "qv <b>": "query", "qv-ka <b>": "key"}
    heads = measured[0]["places"]["decoder"]["heads"]
    assert [(head["layer"], head["index"]) for head in heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for head in heads:
        assert sum(head["query"]["shares"]) == pytest.approx(1) and 1 <= head["key"]["groups"] <= len(GROUPS)
        assert head["matched"]["rank"] == head["key"]["rank"] <= 8
    compared = [line for line in lines(measured, "mha <b>") if line.name == "qv <b>" and line.difference]
    assert compared and all(line.difference is not None and line.difference.count == 2 for line in compared)
    verdicts = predictions(measured, "mha <b>")
    assert {one.name for one in verdicts} == {"mha <b>", "qv <b>", "qv-ka <b>"}
    text = page.read_text()
    assert "qv &lt;b&gt;" in text and "qv <b>" not in text and "default-src &#x27;none" in text


def test_the_best_head_is_chosen_and_reported_on_different_sentences() -> None:
    def head(choose: float, report: float) -> dict:
        return {"separation": {"head": {"choose": {"auc": choose}, "report": {"auc": report}}}}

    best = best_head([head(0.9, 0.5), head(0.7, 0.8), {"separation": {}}], "head")
    assert best == {"auc": 0.5}
    assert best_head([{"separation": {}}], "head") is None


def test_wrong_use(runs: Path, tmp_path: Path) -> None:
    assert main(["diffusion", str(runs), "-o", str(tmp_path / "a.json")]) == 2
    measured = [{"name": "a", "matched_side": {"cross": "query"}}, {"name": "b", "matched_side": {"cross": "key"}}]
    assert choose_baseline(measured, None) == "b"
    with pytest.raises(UserError, match="allowed: a, b"):
        choose_baseline(measured, "c")
