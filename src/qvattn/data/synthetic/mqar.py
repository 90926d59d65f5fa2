"""Multi-query associative recall (MQAR, the task of arXiv 2312.04927): pairs first, then queries for their values.

    input    k5 v2 k1 v7 k9 v4  x  x  k1 x  k5 x  x  x  k9 x      (x: filler)
    answer                             v7    v2             v4

Keys and values come from disjoint halves of the vocabulary. Every pair is asked for once, and the gaps between the
pairs and the questions follow a power law. Only the answers are labelled, so token accuracy is recall accuracy.

As published, but for one point: filler never repeats a key or value of its own row, which in a small vocabulary would
often change the answer. The answers never stand in the input: whoever saw them could guess by elimination. So a model
that knows which values occur, but not to which keys they belong, scores 1 / pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

IGNORED_LABEL = -100
FIRST_ID = 4
"""Ids below are pad, bos, eos and unk."""

PAD_ID = 0
Split = Literal["train", "valid", "test"]
_SPLITS: tuple[Split, ...] = ("train", "valid", "test")

Ids = npt.NDArray[np.int32]
Draw = np.random.Generator


class MqarSpec(BaseModel):
    """How hard the task is; the length of a row is `data.block_size`.

    pairs: keys, each with a value, each asked for once.  vocab_size: keys and values together, half each.
    power: a of p(gap) ~ gap^(a - 1): small values put most questions right after the pairs (0.01 as published).
    train, valid, test: rows.  seed: of the data, the same for all runs of a comparison.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pairs: int = Field(default=8, ge=1)
    vocab_size: int = Field(default=128, ge=4)
    power: float = Field(default=0.01, gt=0)
    train: int = Field(default=20_000, ge=1)
    valid: int = Field(default=500, ge=1)
    test: int = Field(default=500, ge=0)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.vocab_size % 2:
            raise ValueError(f"vocab_size={self.vocab_size}: an even number is needed, half keys and half values")
        if self.pairs >= self.vocab_size // 2:
            raise ValueError(
                f"pairs={self.pairs}: fewer than the {self.vocab_size // 2} keys of vocab_size={self.vocab_size} "
                "are needed, so that filler is left"
            )
        return self

    @property
    def shortest_row(self) -> int:
        """Tokens of a row that is pairs and questions with their answers, without filler."""
        return 4 * self.pairs


def mqar_words(spec: MqarSpec) -> list[str]:
    """The vocabulary in the order of its ids, the first of which is FIRST_ID: keys, then values."""
    half = spec.vocab_size // 2
    return [f"k{i}" for i in range(half)] + [f"v{i}" for i in range(half)]


@dataclass(frozen=True, eq=False)
class MqarDataset:
    """Rows as the training loop sees them.

    ids: `(N, L)`.  questions: `(N, pairs)`, positions of the repeated keys, in the order of the pairs.
    answers: `(N, pairs)`, the ids of their values.  gaps: `(N, pairs)`, tokens between a pair's value and its question.
    """

    ids: Ids
    questions: Ids
    answers: Ids
    gaps: Ids

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """`(N,)`: all rows are equally long."""
        return np.full(len(self.ids), self.ids.shape[1], dtype=np.int64)

    def target_tokens(self, indices: Sequence[int]) -> int:
        """Answers in these rows."""
        return len(indices) * self.answers.shape[1]

    def collate(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids` and `labels` `(B, L)`, int64.

        Labels are IGNORED_LABEL except after a question, where the answer belongs: the model compares its output at
        position t with the label at t + 1. No indices give one row of padding without a label.
        """
        if not len(indices):
            return {"input_ids": torch.full((1, 2), PAD_ID), "labels": torch.full((1, 2), IGNORED_LABEL)}
        rows = np.asarray(indices, dtype=np.int64)
        ids = self.ids[rows].astype(np.int64)
        labels = np.full_like(ids, IGNORED_LABEL)
        np.put_along_axis(
            labels, self.questions[rows].astype(np.int64) + 1, self.answers[rows].astype(np.int64), axis=1
        )
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def make_mqar(spec: MqarSpec, length: int, split: Split) -> MqarDataset:
    """The rows of a split, `length` tokens each: a function of (spec, length, split) alone.

    Raises ValueError if `length` has no room for the pairs and the questions.
    """
    if length < spec.shortest_row:
        raise ValueError(f"length={length}: {spec.pairs} pairs and their questions need {spec.shortest_row} tokens")
    rows: int = getattr(spec, split)
    draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence([spec.seed, _SPLITS.index(split)])))
    half, pairs = spec.vocab_size // 2, spec.pairs
    keys = FIRST_ID + _shuffled(draw, rows, half)
    values = FIRST_ID + half + _shuffled(draw, rows, half)

    unused = np.concatenate([keys[:, pairs:], values[:, pairs:]], axis=1)
    picks = (draw.random((rows, length)) * unused.shape[1]).astype(np.int64)
    ids = np.take_along_axis(unused, picks, axis=1)
    ids[:, 0 : 2 * pairs : 2] = keys[:, :pairs]
    ids[:, 1 : 2 * pairs : 2] = values[:, :pairs]

    questions = 2 * pairs + 2 * _slots(draw, rows, (length - 2 * pairs) // 2, spec)
    np.put_along_axis(ids, questions, keys[:, :pairs], axis=1)
    gaps = questions - (2 * np.arange(pairs) + 2)
    return MqarDataset(*(part.astype(np.int32) for part in (ids, questions, values[:, :pairs], gaps)))


def mqar_texts(spec: MqarSpec, length: int) -> dict[str, list[str]]:
    """Every row as words, apart by spaces, by split."""
    words = [*("",) * FIRST_ID, *mqar_words(spec)]
    rows = {split: make_mqar(spec, length, split).ids.tolist() for split in _SPLITS}
    return {split: [" ".join(words[i] for i in row) for row in ids] for split, ids in rows.items()}


def _shuffled(draw: Draw, rows: int, count: int) -> npt.NDArray[np.int64]:
    """`(rows, count)`: an order of range(count) per row."""
    return np.argsort(draw.random((rows, count)), axis=1, kind="stable")


def _slots(draw: Draw, rows: int, space: int, spec: MqarSpec) -> npt.NDArray[np.int64]:
    """`(rows, pairs)`: different slots per row, drawn one by one with p(slot) ~ (slot + 1)^(power - 1).

    The largest of log p + Gumbel noise are a weighted draw without replacement (Efraimidis and Spirakis 2006).
    """
    weight = (spec.power - 1) * np.log(np.arange(1, space + 1))
    noise = -np.log(-np.log(np.clip(draw.random((rows, space)), 1e-12, 1 - 1e-12)))
    order = np.argsort(-(weight + noise), axis=1, kind="stable")
    return order[:, : spec.pairs]
