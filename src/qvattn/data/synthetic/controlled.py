"""A made language pair with a known grammar: every word's class, head and partner in the other language are on record.

    source  [ADV] S (PREP N)* [ADV] VERB O          S, N, O = DET ADJ* NOUN
    target  (N PREP)* S O [ADV] VERB                S, N, O = DET NOUN ADJ* (adjectives in reverse)

Six word classes. Selectional affinity: every open word belongs to one of a few affinity classes, and an adjective (for
its noun), an adverb (for its verb), a verb (for its subject and object) and a preposition (for the noun it stands with)
are mostly of the same class; such a pair fits. What a translation needs from elsewhere in the sentence:

  * determiners and adjectives agree with their noun in gender and number; gender is not visible on the source side,
  * the verb agrees with its subject in number, across the nouns of prepositional phrases (distractors),
  * adjectives, adverbs and prepositions are translated by one word where they fit their head, by another where not.

So the translation is a function of the source, and a model has to find heads to compute it. Nothing here is random
beyond the seed, and a longer split begins with the shorter one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

CLASSES = ("noun", "adjective", "verb", "adverb", "determiner", "preposition")
"""The word classes, in the order in which tables show them."""

NO_HEAD = -1
Split = Literal["train", "valid", "test"]
_SPLITS: tuple[Split, ...] = ("train", "valid", "test")
_SHORT = {
    "noun": "noun",
    "adjective": "adj",
    "verb": "verb",
    "adverb": "adv",
    "determiner": "det",
    "preposition": "prep",
}
_GENDERS = "abcdefgh"
_NUMBERS = "sp"
_BLOCK = 1 << 16


class ControlledSpec(BaseModel):
    """Size and difficulty of the language.

    affinity_classes: how many kinds of words go together.  words: of each open class in each affinity class.
    affinity: probability that a word fits its head; the others belong to any other affinity class.
    distance: how many words may stand between a modifier and its noun (adjectives pile up); above 0, adverbs may also
        stand at the front, before the whole subject.
    distractors: prepositional phrases that may stand between subject and verb, each with a noun of its own.
    genders: agreement classes of nouns.  senses: whether fit decides between two translations.
    train, valid, test: sentence pairs.  seed: of the data, the same for all runs of a comparison.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    affinity_classes: int = Field(default=4, ge=2, le=32)
    words: int = Field(default=6, ge=1)
    affinity: float = Field(default=0.75, gt=0, le=1)
    distance: int = Field(default=2, ge=0)
    distractors: int = Field(default=1, ge=0)
    genders: int = Field(default=2, ge=1, le=len(_GENDERS))
    senses: bool = True
    train: int = Field(default=20_000, ge=1)
    valid: int = Field(default=500, ge=1)
    test: int = Field(default=500, ge=0)
    seed: int = Field(default=0, ge=0)

    @property
    def lexemes(self) -> int:
        """Words of each open class (all classes but determiners)."""
        return self.affinity_classes * self.words


class Token(NamedTuple):
    """A word of a sentence with what is known about it.

    head: index of the word it modifies, in its own sentence; NO_HEAD for the verb.  aligned: index of its partner in
    the other sentence.  fits: whether its affinity class is its head's; None where no affinity is asked of the pair.
    group: its affinity class, None for determiners.
    """

    word: str
    word_class: str
    head: int
    aligned: int
    fits: bool | None
    group: int | None


@dataclass(frozen=True)
class Sentence:
    """A pair of sentences, word by word."""

    source: tuple[Token, ...]
    target: tuple[Token, ...]

    @property
    def pair(self) -> tuple[str, str]:
        """Both as text, words apart by spaces."""
        return " ".join(token.word for token in self.source), " ".join(token.word for token in self.target)


class Words(NamedTuple):
    """The two vocabularies; no word is in both."""

    source: list[str]
    target: list[str]


@lru_cache(maxsize=8)
def controlled_sentences(spec: ControlledSpec, split: Split) -> tuple[Sentence, ...]:
    """The sentences of a split with their annotation, a function of (spec, split) alone."""
    dice = _Dice(spec.seed, _SPLITS.index(split))
    return tuple(_sentence(spec, dice) for _ in range(getattr(spec, split)))


def controlled_pairs(spec: ControlledSpec) -> dict[str, list[tuple[str, str]]]:
    """Text by split, sentence i of a split is `controlled_sentences(spec, split)[i]`."""
    return {split: [sentence.pair for sentence in controlled_sentences(spec, split)] for split in _SPLITS}


def controlled_words(spec: ControlledSpec) -> Words:
    """Every word either language has, whether or not a sentence uses it."""
    genders, senses = _GENDERS[: spec.genders], "fm" if spec.senses else ("",)
    source: list[str] = []
    target: list[str] = []
    for i in range(spec.lexemes):
        source += [f"noun{i}{n}" for n in _NUMBERS] + [f"adj{i}", f"verb{i}", f"adv{i}", f"prep{i}"]
        target += [f"tnoun{i}{n}" for n in _NUMBERS] + [f"tverb{i}{n}" for n in _NUMBERS]
        target += [f"tadj{i}{s}{g}{n}" for s in senses for g in genders for n in _NUMBERS]
        target += [f"t{kind}{i}{s}" for kind in ("adv", "prep") for s in senses]
    for i in range(_DETERMINERS):
        source += [f"det{i}{n}" for n in _NUMBERS]
        target += [f"tdet{i}{g}{n}" for g in genders for n in _NUMBERS]
    return Words(source, target)


_DETERMINERS = 4


class _Dice:
    """Uniform draws in blocks: of a generator's methods the least likely to change between versions."""

    def __init__(self, seed: int, split: int) -> None:
        self._draws = self._stream(np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, split]))))

    @staticmethod
    def _stream(generator: np.random.Generator) -> Iterator[float]:
        while True:
            yield from generator.random(_BLOCK).tolist()

    def chance(self, probability: float) -> bool:
        return next(self._draws) < probability

    def below(self, count: int) -> int:
        return int(next(self._draws) * count)


@dataclass(eq=False)
class _Node:
    """A word before it has a form: `number` is 0 or 1 where it shows, on nouns and what agrees with them."""

    kind: str
    lexeme: int
    head: _Node | None = None
    number: int = 0
    fits: bool | None = None


def _sentence(spec: ControlledSpec, dice: _Dice) -> Sentence:
    verb = _Node("verb", dice.below(spec.lexemes))
    subject, thing = (_noun(spec, dice, verb, partner=verb) for _ in range(2))
    verb.number = subject[-1].number
    phrases = [_phrase(spec, dice, subject[-1]) for _ in range(dice.below(spec.distractors + 1))]
    adverbs = [_partner("adverb", verb, spec, dice)] if dice.chance(0.6) else []
    front = bool(adverbs) and spec.distance > 0 and dice.chance(0.5)

    source = [*subject, *(node for phrase in phrases for node in phrase)]
    source = [*adverbs, *source, verb] if front else [*source, *adverbs, verb]
    before = [node for preposition, *noun in phrases for node in (*_turned(noun), preposition)]
    target = [*before, *_turned(subject), *_turned(thing), *adverbs, verb]
    return _written([*source, *thing], target, spec)


def _noun(spec: ControlledSpec, dice: _Dice, head: _Node, partner: _Node | None = None) -> list[_Node]:
    """A noun phrase in source order. partner: the word that the noun mostly fits."""
    noun = _partner("noun", partner, spec, dice) if partner else _Node("noun", dice.below(spec.lexemes))
    noun.head, noun.number = head, dice.below(2)
    adjectives = [_partner("adjective", noun, spec, dice) for _ in range(dice.below(spec.distance + 2))]
    determiner = _Node("determiner", dice.below(_DETERMINERS), noun, noun.number)
    return [determiner, *adjectives, noun]


def _phrase(spec: ControlledSpec, dice: _Dice, noun: _Node) -> list[_Node]:
    preposition = _partner("preposition", noun, spec, dice)
    return [preposition, *_noun(spec, dice, preposition)]


def _partner(kind: str, head: _Node, spec: ControlledSpec, dice: _Dice) -> _Node:
    """A word that modifies `head` and mostly fits it. A lexeme's affinity class is its remainder."""
    group = head.lexeme % spec.affinity_classes
    fits = dice.chance(spec.affinity)
    if not fits:
        group = (group + 1 + dice.below(spec.affinity_classes - 1)) % spec.affinity_classes
    lexeme = group + spec.affinity_classes * dice.below(spec.words)
    return _Node(kind, lexeme, head, head.number, fits)


def _turned(noun: list[_Node]) -> list[_Node]:
    """A noun phrase in target order."""
    determiner, *adjectives, last = noun
    return [determiner, last, *reversed(adjectives)]


def _written(source: list[_Node], target: list[_Node], spec: ControlledSpec) -> Sentence:
    in_source = {id(node): i for i, node in enumerate(source)}
    in_target = {id(node): i for i, node in enumerate(target)}

    def token(node: _Node, word: str, own: dict[int, int], other: dict[int, int]) -> Token:
        head = NO_HEAD if node.head is None else own[id(node.head)]
        group = None if node.kind == "determiner" else node.lexeme % spec.affinity_classes
        return Token(word, node.kind, head, other[id(node)], node.fits, group)

    return Sentence(
        tuple(token(node, _source_word(node), in_source, in_target) for node in source),
        tuple(token(node, _target_word(node, spec), in_target, in_source) for node in target),
    )


def _source_word(node: _Node) -> str:
    number = _NUMBERS[node.number] if node.kind in ("noun", "determiner") else ""
    return f"{_SHORT[node.kind]}{node.lexeme}{number}"


def _target_word(node: _Node, spec: ControlledSpec) -> str:
    stem = f"t{_SHORT[node.kind]}{node.lexeme}"
    sense = "" if not spec.senses else "f" if node.fits else "m"
    if node.kind in ("noun", "verb"):
        return stem + _NUMBERS[node.number]
    if node.kind in ("adverb", "preposition"):
        return stem + sense
    assert node.head is not None
    gender = _GENDERS[node.head.lexeme // spec.affinity_classes % spec.genders]
    return stem + (sense if node.kind == "adjective" else "") + gender + _NUMBERS[node.number]
