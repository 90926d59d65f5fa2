"""Many sources through a few rows: the results of `greedy`, whatever the rows and the order."""

from __future__ import annotations

import random

import pytest
import torch

from qvattn import UserError
from qvattn.decode import LeanModel, greedy, greedy_many
from qvattn.decode import many as module

from .small import FEW, VOCABULARY, ends, language, translation, until_end

DRAW = random.Random(1)
SOURCES = [[DRAW.randrange(3, VOCABULARY) for _ in range(DRAW.choice([1, 2, 3, 5, 8, 13]))] for _ in range(40)]


def alone(model: LeanModel, source: list[int], limit: int) -> list[int]:
    row = until_end(greedy(model, torch.tensor([source]), max_new_tokens=limit))[0, 1:].tolist()
    return row[: row.index(0)] if 0 in row else row


@pytest.mark.parametrize(("variant", "position"), FEW)
def test_every_source_gives_what_it_gives_alone(variant: str, position: str) -> None:
    model = LeanModel(ends(translation(variant, position)))
    sources = SOURCES[:14]
    made = greedy_many(model, sources, rows=5, max_new_tokens=11)
    assert made == [alone(model, source, 11) for source in sources]


@pytest.mark.parametrize("rows", [1, 2, 7, 40, 100])
def test_any_number_of_rows(rows: int) -> None:
    model, done = LeanModel(ends(translation())), []
    limits = [1 + (7 * i) % 12 for i in range(len(SOURCES))]
    made = greedy_many(model, SOURCES, rows=rows, max_new_tokens=12, limits=limits, on_done=done.append)
    assert made == [alone(model, source, n) for source, n in zip(SOURCES, limits, strict=True)]
    assert sum(done) == len(SOURCES) and len({len(row) for row in made}) > 3


def test_limits_of_single_sources() -> None:
    model = LeanModel(ends(translation()))
    whole = greedy_many(model, SOURCES, rows=6, max_new_tokens=9)
    limits = [1 + i % 9 for i in range(len(SOURCES))]
    cut = greedy_many(model, SOURCES, rows=6, max_new_tokens=9, limits=limits)
    assert cut == [row[:n] for row, n in zip(whole, limits, strict=True)]


def test_the_cache_stays_small_however_many_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    step = module.RowSession.step

    def watching(self: module.RowSession, tokens: torch.Tensor) -> torch.Tensor:
        logits = step(self, tokens)
        lengths.append(self.cache.length)
        return logits

    monkeypatch.setattr(module.RowSession, "step", watching)
    greedy_many(ends(translation("qv")), SOURCES * 5, rows=4, max_new_tokens=12)
    assert len(lengths) > 250 and max(lengths) == 12


def test_refusals() -> None:
    model = translation()
    assert greedy_many(model, []) == []
    for call, words in (
        (lambda: greedy_many(model, SOURCES, rows=0), "rows=0"),
        (lambda: greedy_many(model, SOURCES, limits=[1]), "limits: 1 numbers"),
        (lambda: greedy_many(language(), SOURCES), "translation model"),
    ):
        with pytest.raises(UserError, match=words):
            call()


def test_a_shorter_source_in_the_row_of_a_longer_one() -> None:
    """While a neighbour's source is as long as before, nothing but the row's own mask hides the old one's rest."""
    model = LeanModel(ends(translation()))
    sources = [[DRAW.randrange(3, VOCABULARY) for _ in range(n)] for n in (9, 9, 2, 1, 3, 1)]
    limits = [12, 1, 4, 3, 5, 4]
    made = greedy_many(model, sources, rows=2, max_new_tokens=12, limits=limits)
    assert made == [alone(model, source, n) for source, n in zip(sources, limits, strict=True)]
