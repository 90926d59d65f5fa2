"""Saved models and runs for the command's tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from specimens import language_model, translation_model

from qvattn.data import DataSpec, Tokenizers, build_text_tokenizer, build_tokenizers

SENTENCES = [
    f"the {a} {b} {v} over the {c} and then sleeps near the {b} river"
    for a, b, c, v in zip(
        ("quick", "slow", "old", "young", "red", "blue") * 4,
        ("fox", "dog", "cat", "bird") * 6,
        ("hill", "wall", "bridge") * 8,
        ("jumps", "walks", "flies", "runs", "climbs") * 5,
        strict=False,
    )
]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(SENTENCES), encoding="utf-8")
    return path


@pytest.fixture
def saved_language_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tokenizer = build_text_tokenizer(SENTENCES, DataSpec(corpus="text", train_text="-", vocab_size=280))
    language_model("qv", vocab_size=len(tokenizer)).save_pretrained(folder)
    Tokenizers(tokenizer, tokenizer).save(folder)
    return folder


@pytest.fixture
def translation_run(tmp_path: Path, text_file: Path) -> Path:
    """A run directory as training leaves it, with a validation split of its own."""
    run = tmp_path / "run"
    reverse = tmp_path / "reverse.txt"
    reverse.write_text("\n".join(" ".join(reversed(s.split())) for s in SENTENCES), encoding="utf-8")
    pairs = list(zip(SENTENCES, reverse.read_text(encoding="utf-8").split("\n"), strict=True))
    files = {"train_source": str(text_file), "train_target": str(reverse)}
    toks = build_tokenizers(pairs, DataSpec(corpus="files", vocab_size=280, **files))
    checkpoint = run / "checkpoints" / "step-0000001"
    size = len(toks.target)
    translation_model("qv-ka", source_vocab_size=size, target_vocab_size=size).save_pretrained(checkpoint)
    (checkpoint / "state.json").write_text(json.dumps({"best": None}), encoding="utf-8")
    toks.save(run)
    lines = [f"  {name}: {path}" for name, path in files.items()]
    data = "\n".join(["data:", "  corpus: files", *lines, "  valid_fraction: 0.3", "  vocab_size: 280"])
    (run / "recipe.yaml").write_text(f"name: tiny\ntask: translation\n{data}\n", encoding="utf-8")
    return run
