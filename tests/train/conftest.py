"""A toy language pair and tiny recipes, so that a whole training run takes a fraction of a second."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from qvattn.train.recipe import Recipe, read_recipe

ENGLISH = ("a", "the", "old", "young", "man", "woman", "dog", "cat", "house", "river", "sees", "finds", "big", "red")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_pairs(folder: Path, name: str, count: int, seed: int) -> tuple[str, str]:
    """Two aligned files: sentences of 3 to 9 words, and the same words reversed letter by letter."""
    draw = random.Random(seed)
    source, target = folder / f"{name}.en", folder / f"{name}.xx"
    lines = [" ".join(draw.choice(ENGLISH) for _ in range(draw.randint(3, 9))) for _ in range(count)]
    source.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    target.write_text("".join(" ".join(w[::-1] for w in line.split()) + "\n" for line in lines), encoding="utf-8")
    return str(source), str(target)


@pytest.fixture(scope="session")
def corpus_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The `data` keys of a recipe that reads the toy corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    keys = {}
    for split, count in (("train", 160), ("valid", 24), ("test", 16)):
        keys[f"{split}_source"], keys[f"{split}_target"] = write_pairs(folder, split, count, seed=count)
    return keys


MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def toy(corpus_files: dict[str, str]) -> MakeRecipe:
    """`toy("train.steps=5", ...)`: a tiny valid recipe with overrides; 160 pairs make about 12 batches an epoch."""

    def make(*overrides: str) -> Recipe:
        return read_recipe(toy_text(corpus_files), origin="toy", overrides=overrides)

    return make


@pytest.fixture
def toy_file(corpus_files: dict[str, str], tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(toy_text(corpus_files), encoding="utf-8")
    return path


def toy_text(corpus_files: dict[str, str]) -> str:
    content: dict[str, Any] = {
        "name": "toy",
        "data": {"corpus": "files", **corpus_files, "vocab_size": 300, "max_tokens": 400},
        "model": {
            "d_model": 16,
            "d_ff": 32,
            "n_heads": 2,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "dropout": 0.2,
            "attention": {"variant": "qv-ka", "d_ctx": 8},
            "position": "agf+pcm-v",
        },
        "train": {
            "steps": 10,
            "learning_rate": 0.01,
            "warmup_steps": 4,
            "validate_every": 5,
            "report_every": 3,
            "tensorboard": False,
            "device": "cpu",
        },
    }
    return yaml.safe_dump(content, sort_keys=False)
