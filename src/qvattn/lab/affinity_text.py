"""Affinity on natural text: attention between word classes, which a tagger gives instead of a grammar.

The tagger is the optional package HanTa (English, German, Dutch; its models are inside it). Only classes are known
then: no heads, no partners, and the tagger errs. A word's subwords are put together: their columns are summed, their
rows averaged. Words of other classes (pronouns, particles, punctuation) are columns, not queries.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..data.synthetic.controlled import CLASSES, NO_HEAD, Token
from ..errors import UserError
from .affinity import PLACES, Floats, Place, PlaceTally, Question, View, identity, open_translation, results
from .affinity import watched_pairs as watched

Tagger = Callable[[Sequence[str]], list[str]]
"""Words of a sentence -> the class of each, one of CLASSES or "other"."""

OTHER = "other"
_MODELS = {"en": "morphmodel_en.pgz", "de": "morphmodel_ger.pgz", "nl": "morphmodel_dutch.pgz"}
_PREFIXES: dict[str, dict[str, tuple[str, ...]]] = {
    "en": {  # CLAWS C5
        "noun": ("NN", "NP"),
        "adjective": ("AJ",),
        "verb": ("V",),
        "adverb": ("AV",),
        "determiner": ("AT", "DT", "DPS"),
        "preposition": ("PRP", "PRF"),
    },
    "de": {  # STTS
        "noun": ("NN", "NE"),
        "adjective": ("ADJ",),
        "verb": ("VV", "VA", "VM"),
        "adverb": ("ADV",),
        "determiner": ("ART", "PIAT", "PDAT", "PPOSAT", "PWAT"),
        "preposition": ("APPR",),
    },
    "nl": {
        "noun": ("N(", "SPEC"),
        "adjective": ("ADJ",),
        "verb": ("WW",),
        "adverb": ("BW",),
        "determiner": ("LID",),
        "preposition": ("VZ",),
    },
}
_WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")


def tagger(language: str) -> Tagger:
    """The tagger of a language. Raises UserError for one that is not known, and where HanTa is not installed."""
    if language not in _MODELS:
        raise UserError(f"--tags {language!r}: allowed are {', '.join(_MODELS)}")
    try:
        module = importlib.import_module("HanTa.HanoverTagger")
    except ImportError:
        raise UserError("--tags: the tagger is in the package HanTa; install it with `pip install HanTa`") from None
    inner = module.HanoverTagger(_MODELS[language])
    return lambda words: [class_of(tag, language) for _, _, tag in inner.tag_sent(list(words))]


def class_of(tag: str, language: str) -> str:
    """The word class that a tag of this language's tag set belongs to."""
    found = (name for name, prefixes in _PREFIXES[language].items() if tag.startswith(prefixes))
    return next(found, OTHER)


def measure(
    path: Path,
    taggers: tuple[Tagger, Tagger],
    *,
    sentences: int = 500,
    checkpoint: Literal["best", "last"] = "best",
) -> dict[str, Any]:
    """Attention between word classes of one run in JSON's types, as `affinity.measure` gives it.

    taggers: of source and target.  sentences: at most so many validation pairs, evenly spaced.
    Raises UserError if the run did not translate.
    """
    model, recipe, tokenizers = open_translation(path, checkpoint)
    tallies = {place: PlaceTally() for place in PLACES}
    used = 0
    for pair, views in watched(model, recipe, tokenizers, sentences):
        used += 1
        sides = zip(pair, taggers, (tokenizers.source, tokenizers.target), strict=True)
        source, target = (_Side(text, tag, tokenizer) for text, tag, tokenizer in sides)
        for place in PLACES:
            _add(tallies[place], views[place], place, source, target)
    return {**identity(path, model, recipe), **results(tallies, used)}


class _Side:
    """A sentence as words: their classes, and which word each token belongs to (-1: none, such as its end)."""

    def __init__(self, text: str, tag: Tagger, tokenizer: Any) -> None:
        spans = [match.span() for match in _WORD.finditer(text)]
        self.classes = tag([text[a:b] for a, b in spans]) if spans else []
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        self.words = np.array([_word_at(text, span, spans) for span in offsets], dtype=np.int64)

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """Class index of each word, -1 for other classes."""
        return np.array([CLASSES.index(c) if c in CLASSES else -1 for c in self.classes], dtype=np.int64)

    def rows(self, tokens: int) -> Floats:
        """(words, tokens): averages over a word's tokens."""
        one = (np.arange(len(self.classes))[:, None] == self.words[None, :tokens]).astype(float)
        averages: Floats = one / np.maximum(one.sum(axis=1, keepdims=True), 1)
        return averages


def _word_at(text: str, span: tuple[int, int], words: Sequence[tuple[int, int]]) -> int:
    """The word that a token's first character, spaces left out, lies in."""
    start, end = span
    while start < end and text[start].isspace():
        start += 1
    if start == end:
        return -1
    return next((i for i, (a, b) in enumerate(words) if a <= start < b), -1)


def _add(tally: PlaceTally, view: View, place: Place, source: _Side, target: _Side) -> None:
    asking = source if place == "encoder" else target
    asked = target if place == "decoder" else source
    rows = asking.rows(view.weights.shape[2])
    # the decoder's columns: the start token, then the tokens already written
    columns = np.concatenate([[-1], asked.words])[: view.weights.shape[3]] if place == "decoder" else asked.words
    numbers = np.append(asked.numbers, -1)  # the last: columns that are no word
    for word, kind in enumerate(asking.numbers):
        if kind < 0 or not rows[word].any():
            continue
        weights = np.einsum("m,lhmt->lht", rows[word], view.weights)
        seen = columns if place != "decoder" else columns[: int(np.flatnonzero(rows[word])[-1]) + 1]
        own = Token("", CLASSES[kind], NO_HEAD, 0, None, None)
        question = Question(row=word, word=own, column_class=numbers[seen], wanted={"head": []}, rivals={})
        tally.add(question, weights[..., : len(seen)])
