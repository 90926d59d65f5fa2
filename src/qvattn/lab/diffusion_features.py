"""What a word of the controlled language is, as nested groups of features, and how much of a vector each explains.

The groups are taken in a fixed order, each counted only for what those before it leave over, so that the parts of a
vector's variance add up to the whole. Nothing here knows about attention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.synthetic.controlled import NO_HEAD, ControlledSpec, Sentence, Token

Floats = npt.NDArray[np.float64]

GROUPS = ("class", "number", "gender", "affinity", "word", "position", "head", "rest")
"""In the order in which they are counted: word class; number and gender where they show (a noun's gender always);
affinity class; the word itself; its place in the sentence; the word it modifies; what none of these explains."""

_FORM = re.compile(r"t?[a-z]+?(?P<lexeme>\d+)(?P<ending>[a-z]*)$")
_TOLERANCE = 1e-8


def describe(sentence: Sequence[Token], spec: ControlledSpec) -> list[tuple[Any, ...]]:
    """The value of every group but `rest` for every word of a sentence of either language."""
    rows = []
    for i, token in enumerate(sentence):
        number, gender = _agreement(token, spec)
        head = "" if token.head == NO_HEAD else sentence[token.head].word
        rows.append((token.word_class, number, gender, token.group, token.word, i, head))
    return rows


def sides(sentence: Sentence, spec: ControlledSpec) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """`describe` for source and target."""
    return describe(sentence.source, spec), describe(sentence.target, spec)


def _agreement(token: Token, spec: ControlledSpec) -> tuple[str, str]:
    """Number and gender: as the form shows them; a noun's gender from its lexeme, where no form shows it."""
    form = _FORM.match(token.word)
    assert form is not None
    ending, foreign = form["ending"], token.word.startswith("t")
    number = ending[-1:] if token.word_class not in ("adverb", "preposition") and ending[-1:] in ("s", "p") else ""
    if token.word_class == "noun":
        return number, "abcdefgh"[int(form["lexeme"]) // spec.affinity_classes % spec.genders]
    shows_gender = foreign and token.word_class in ("adjective", "determiner")
    return number, ending[-2:-1] if shows_gender else ""


class Decomposition:
    """Nested projections of rows onto feature groups.

    rows: the features of every vector, from `describe`. Vectors are centred: what all share belongs to no group.
    """

    def __init__(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self.count = len(rows)
        basis = np.full((self.count, 1), self.count**-0.5)
        self._parts: list[Floats] = []
        for column in zip(*rows, strict=True):
            names, codes = np.unique([str(value) for value in column], return_inverse=True)
            design = np.eye(len(names))[codes]
            part = _new_directions(design, basis)
            self._parts.append(part)
            basis = np.concatenate([basis, part], axis=1)

    def covariances(self, vectors: Floats) -> Floats:
        """vectors (N, D) -> (groups, D, D): the covariance that each group explains, `rest` last; they add up."""
        centred = vectors - vectors.mean(axis=0)
        parts = [part.T @ centred for part in self._parts]
        explained = [part.T @ part / self.count for part in parts]
        whole = centred.T @ centred / self.count
        return np.stack([*explained, whole - sum(explained)])


def _new_directions(design: Floats, basis: Floats) -> Floats:
    """An orthonormal basis of what the columns of `design` add to `basis`."""
    left = design - basis @ (basis.T @ design)
    u, s, _ = np.linalg.svd(left, full_matrices=False)
    return u[:, s > _TOLERANCE * np.sqrt(len(design))]
