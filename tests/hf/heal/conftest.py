"""A teacher that has learned a toy text, and a converted model: the same weights with keys made another way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from qvattn.data import DataSpec, build_text_tokenizer
from qvattn.hf.heal import HealSpec
from qvattn.models import CausalLM, CausalLMConfig, initialise

WORDS = ("a", "the", "old", "young", "man", "woman", "dog", "cat", "house", "river", "sees", "finds", "big", "red")
SIZES: dict[str, Any] = {"d_model": 32, "d_ff": 64, "n_heads": 4, "layers": 2, "dropout": 0.0}
TEACHER = {"variant": "gqa", "k_heads": 2, "v_heads": 2}
CONVERTED = {"variant": "qv-ka-gqa", "v_heads": 2, "d_ctx": 4}


@dataclass(frozen=True)
class Toy:
    """Folders of the two models, and text to learn from and to be tested on."""

    teacher: Path
    converted: Path
    text: Path
    test: Path


def sentences(count: int, seed: int) -> str:
    """Sentences in which every word decides the next but one: something that attention is needed for."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        words = [draw.randrange(len(WORDS)), draw.randrange(len(WORDS))]
        words += [0] * 10
        for i in range(2, 12):
            words[i] = (words[i - 2] * 3 + 1 + draw.randrange(2)) % len(WORDS)
        lines.append(" ".join(WORDS[w] for w in words) + " .")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("heal")
    text, test = folder / "train.txt", folder / "test.txt"
    text.write_text(sentences(400, 1), encoding="utf-8")
    test.write_text(sentences(80, 2), encoding="utf-8")
    words = build_text_tokenizer(text.read_text().splitlines(), DataSpec(corpus="kjv", vocab_size=300))
    teacher = CausalLM(CausalLMConfig(vocab_size=len(words), attention=TEACHER, **SIZES))
    initialise(teacher, 1)
    ids = torch.tensor(words(text.read_text(), add_special_tokens=False)["input_ids"])
    ids = ids[: len(ids) // 32 * 32].view(-1, 32)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for step in range(150):
        rows = ids[torch.arange(step * 16, step * 16 + 16) % len(ids)]
        teacher(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    converted = CausalLM(CausalLMConfig(vocab_size=len(words), attention=CONVERTED, **SIZES))
    initialise(converted, 2)
    known = teacher.state_dict()
    with torch.no_grad():
        for name, parameter in converted.named_parameters():
            if name in known and known[name].shape == parameter.shape:
                parameter.copy_(known[name])
    made = Toy(teacher=folder / "teacher", converted=folder / "converted", text=text, test=test)
    for model, path in ((teacher, made.teacher), (converted, made.converted)):
        model.save_pretrained(path)
        words.save_pretrained(path)
    (made.converted / "conversion.json").write_text('{"to": "qv-ka-gqa"}', encoding="utf-8")
    (made.converted / "README.md").write_text("# A converted toy\n", encoding="utf-8")
    return made


MakeSpec = Callable[..., HealSpec]


@pytest.fixture
def recipe(toy: Toy) -> MakeSpec:
    """`recipe(steps=4, ...)`: a tiny healing run with changes."""

    def make(**changes: Any) -> HealSpec:
        fields: dict[str, Any] = {
            "converted": str(toy.converted),
            "teacher": str(toy.teacher),
            "text": (str(toy.text),),
            "test": (str(toy.test),),
            "what": "all",
            "steps": 6,
            "validations": 3,
            "tokens": 512,
            "micro_tokens": 256,
            "context": 32,
            "learning_rate": 3e-3,
            "valid_tokens": 256,
            "test_tokens": 320,
            "test_window": 32,
        }
        return HealSpec(**(fields | changes))

    return make
