"""BLEU and chrF of runs: on the test split at the end, on validation sentences on the way; training does not notice."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from qvattn.errors import UserError
from qvattn.train.checkpoint import find_checkpoint
from qvattn.train.recipe import read_recipe
from qvattn.train.run import run_training

from .conftest import MakeRecipe

SHORT = ("train.steps=6", "train.validate_every=3", "train.warmup_steps=2")


def test_scores_are_written_and_training_is_the_same(toy: MakeRecipe, tmp_path: Path) -> None:
    plain = run_training(toy(*SHORT), tmp_path / "plain")
    scored = run_training(
        toy(*SHORT, "train.score_test=true", "train.score_beam=2", "train.score_valid=4"), tmp_path / "scored"
    )
    weights = [load_file(find_checkpoint(tmp_path / name) / "model.safetensors") for name in ("plain", "scored")]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert plain["valid"] == scored["valid"]
    test = json.loads((tmp_path / "scored" / "results.json").read_text())["test"]
    assert test["accuracy"] == plain["test"]["accuracy"] and "bleu" not in plain["test"]
    assert 0 <= test["bleu"] <= 100 and 0 <= test["chrf"] <= 100
    assert (test["beam"], test["sentences"]) == (2, 16) and "tok:13a" in test["bleu_signature"]
    rows = list(csv.DictReader((tmp_path / "scored" / "history.csv").open()))
    assert [row["step"] for row in rows if row["valid_bleu"]] == ["3", "6"]
    assert not any(row["valid_bleu"] for row in csv.DictReader((tmp_path / "plain" / "history.csv").open()))


def test_scoring_may_be_asked_for_on_resume(toy: MakeRecipe, tmp_path: Path) -> None:
    run_training(toy(*SHORT), tmp_path, stop_at=3)
    results = run_training(toy(*SHORT, "train.score_test=true", "train.score_beam=1"), tmp_path, resume=True)
    assert results["test"]["beam"] == 1


def test_a_language_model_has_no_translations() -> None:
    text = "name: a\ntask: causal-lm\ndata: {corpus: kjv}\ntrain: {score_test: true}\n"
    with pytest.raises(UserError, match="no translations to score"):
        read_recipe(text, origin="a")
