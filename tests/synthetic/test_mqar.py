"""Associative recall: rows follow the rules, labels stand where answers belong, and runs go through the usual loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qvattn.data import DataSpec, load_text
from qvattn.data.synthetic.mqar import FIRST_ID, IGNORED_LABEL, MqarSpec, make_mqar, mqar_words
from qvattn.train.recipe import expand, load_recipe, read_recipe
from qvattn.train.run import run_training

SMALL = MqarSpec(pairs=3, vocab_size=20, train=40, valid=20, test=10)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(7, 20), st.integers(0, 9), st.sampled_from([0.01, 0.5, 1.0, 2.0]))
def test_rows_follow_the_rules(pairs: int, half: int, extra: int, power: float) -> None:
    spec = MqarSpec(pairs=pairs, vocab_size=2 * half, train=15, power=power)
    data = make_mqar(spec, spec.shortest_row + extra, "train")
    ids, labels = (x.numpy() for x in data.collate(range(15)).values())
    for row in range(15):
        keys, values = ids[row, 0 : 2 * pairs : 2], ids[row, 1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert (keys < FIRST_ID + half).all() and (values >= FIRST_ID + half).all() and ids.min() >= FIRST_ID
        memory = dict(zip(keys, values, strict=True))
        asked = np.flatnonzero(labels[row] != IGNORED_LABEL) - 1
        assert sorted(ids[row, asked]) == sorted(keys)
        assert [memory[ids[row, at]] for at in asked] == list(labels[row, asked + 1])
        rest = np.delete(ids[row], [*range(2 * pairs), *asked])
        assert not set(rest) & (set(keys) | set(values)), "filler repeats a key or value of the row"
        where = {key: 2 * i + 1 for i, key in enumerate(keys)}
        assert sorted(data.gaps[row]) == sorted(at - where[ids[row, at]] - 1 for at in asked)


def test_gaps_follow_a_power_law() -> None:
    def first_slot_share(power: float) -> float:
        spec = MqarSpec(pairs=1, vocab_size=20, train=4000, power=power)
        return float((make_mqar(spec, 2 + 2 * 8, "train").gaps == 0).mean())

    weights = np.arange(1, 9) ** (0.5 - 1)
    assert abs(first_slot_share(0.5) - weights[0] / weights.sum()) < 0.03
    assert abs(first_slot_share(1.0) - 1 / 8) < 0.02
    assert first_slot_share(0.01) > 0.33


def test_deterministic_and_splits_differ() -> None:
    a, b = (make_mqar(SMALL, 16, "train") for _ in range(2))
    assert (a.ids == b.ids).all()
    assert (make_mqar(SMALL, 16, "valid").ids != a.ids[:20]).any()
    assert (make_mqar(SMALL.model_copy(update={"seed": 1}), 16, "train").ids != a.ids).any()
    assert a.target_tokens([0, 1]) == 6 and list(a.lengths) == [16] * 40
    assert (a.collate([])["labels"] == IGNORED_LABEL).all()


def test_words() -> None:
    texts = load_text(DataSpec(corpus="mqar", mqar=SMALL, block_size=16))
    words, row = texts.valid[0].split(), make_mqar(SMALL, 16, "valid").ids[0]
    assert [FIRST_ID + mqar_words(SMALL).index(word) for word in words] == list(row)


def test_mistakes_name_the_field() -> None:
    with pytest.raises(ValueError, match="block_size=8: the pairs and questions of mqar need 12 tokens"):
        DataSpec(corpus="mqar", mqar=SMALL, block_size=8)
    with pytest.raises(ValueError, match="vocab_size=21: an even number"):
        MqarSpec(vocab_size=21)
    with pytest.raises(ValueError, match="pairs=10: fewer than the 10 keys"):
        MqarSpec(pairs=10, vocab_size=20)
    with pytest.raises(ValueError, match="length=4"):
        make_mqar(SMALL, 4, "train")


def test_the_shipped_recipe_is_a_grid() -> None:
    runs = expand(load_recipe("mqar"))
    assert len({run.slug for run in runs}) == len(runs) and len({run.seed for run in runs}) == 3


RECIPE = """
name: tiny
task: causal-lm
data: {corpus: mqar, block_size: 16, max_tokens: 128, mqar: {pairs: 3, vocab_size: 20, train: 40, valid: 20, test: 10}}
model: {d_model: 16, d_ff: 16, n_heads: 2, decoder_layers: 1, dropout: 0.0, attention: qv-ka, position: t5}
train: {steps: 4, validate_every: 2, label_smoothing: 0.0, tensorboard: false}
"""


def test_trains_resumes_and_counts_answers_only(tmp_path: Path) -> None:
    recipe = read_recipe(RECIPE, origin="test")
    whole = run_training(recipe, tmp_path / "whole")
    assert whole["valid"]["tokens"] == 20 * 3 and whole["test"]["tokens"] == 10 * 3 and whole["tokens"] == 4 * 8 * 3
    run_training(recipe, tmp_path / "cut", stop_at=2)
    cut = run_training(recipe, tmp_path / "cut", resume=True)
    assert cut["valid"] == whole["valid"]


def test_recall_reads_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qvattn.cli import main
    from qvattn.lab.recall import accuracy_by_gap, recall_rows

    recipe = read_recipe(RECIPE, origin="test")
    results = [run_training(recipe, tmp_path / f"run{seed}", seed=seed) for seed in (1, 2)]
    (row,) = recall_rows([tmp_path])
    assert row.accuracy == {seed: results[seed - 1]["valid"]["accuracy"] for seed in (1, 2)}
    assert row.solved == 0 and row.chance == pytest.approx(1 / 3)
    bins = accuracy_by_gap(tmp_path / "run1")
    assert sum(one.count for one in bins) == 60
    hits = sum(one.accuracy * one.count for one in bins)
    assert hits / 60 == pytest.approx(results[0]["valid"]["accuracy"])
    assert main(["recall", str(tmp_path), "--gaps"]) == 0
    assert "| tiny | 32 |" in capsys.readouterr().out
