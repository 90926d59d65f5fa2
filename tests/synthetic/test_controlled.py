"""The controlled language: its rules hold in every sentence, and its words survive the tokenizer."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from qvattn.data import DataSpec, ParallelDataset, Tokenizers, build_tokenizers, load_corpus
from qvattn.data.synthetic.controlled import (
    CLASSES,
    NO_HEAD,
    ControlledSpec,
    Sentence,
    Token,
    controlled_sentences,
    controlled_words,
)

SPEC = ControlledSpec(train=1500, valid=80, test=20, distractors=2)
MODIFIES = {
    "adjective": {"noun"},
    "determiner": {"noun"},
    "adverb": {"verb"},
    "noun": {"verb", "preposition"},
    "preposition": {"noun"},
}


@pytest.fixture(scope="module")
def sentences() -> tuple[Sentence, ...]:
    return controlled_sentences(SPEC, "train")


def both(sentence: Sentence) -> list[tuple[Token, ...]]:
    return [sentence.source, sentence.target]


def test_every_word_modifies_a_word_of_the_right_class(sentences: tuple[Sentence, ...]) -> None:
    for side in (side for sentence in sentences for side in both(sentence)):
        assert [token.word_class for token in side if token.head == NO_HEAD] == ["verb"]
        for token in side:
            if token.head != NO_HEAD:
                assert side[token.head].word_class in MODIFIES[token.word_class]
    assert {token.word_class for sentence in sentences for token in sentence.source} == set(CLASSES)


def test_partners_have_the_same_class_head_and_fit(sentences: tuple[Sentence, ...]) -> None:
    for s in sentences:
        assert sorted(token.aligned for token in s.source) == list(range(len(s.target)))
        for i, token in enumerate(s.source):
            partner = s.target[token.aligned]
            assert partner.aligned == i
            assert (partner.word_class, partner.fits, partner.group) == (token.word_class, token.fits, token.group)
            if token.head != NO_HEAD:
                assert partner.head == s.source[token.head].aligned


def test_fit_is_equality_of_groups_and_as_frequent_as_asked(sentences: tuple[Sentence, ...]) -> None:
    fits = []
    for s in sentences:
        for token in s.source:
            if token.fits is not None:
                assert token.fits == (token.group == s.source[token.head].group)
                fits.append(token.fits)
    assert abs(sum(fits) / len(fits) - SPEC.affinity) < 0.02


def test_agreement(sentences: tuple[Sentence, ...]) -> None:
    for s in sentences:
        for token in s.target:
            noun = s.target[token.head] if token.word_class in ("adjective", "determiner") else None
            if noun is not None:
                assert noun.word[-1] == token.word[-1], "number"
                index = int(noun.word[len("tnoun") : -1])
                assert token.word[-2] == "ab"[index // SPEC.affinity_classes % 2], "gender"
        verb = next(i for i, token in enumerate(s.source) if token.head == NO_HEAD)
        subject = next(token for token in s.source[:verb] if token.word_class == "noun" and token.head == verb)
        assert s.target[s.source[verb].aligned].word[-1] == subject.word[-1]


def test_the_source_decides_the_target() -> None:
    spec = ControlledSpec(train=3000, affinity_classes=2, words=1, distance=0, distractors=0)
    seen: dict[str, str] = {}
    for sentence in controlled_sentences(spec, "train"):
        source, target = sentence.pair
        assert seen.setdefault(source, target) == target
    assert len(seen) < 3000, "no sentence came twice, so nothing was shown"


def test_the_languages_order_words_differently(sentences: tuple[Sentence, ...]) -> None:
    assert all(s.target[-1].word_class == "verb" for s in sentences)
    monotone = sum(all(a.aligned < b.aligned for a, b in pairwise(s.source)) for s in sentences)
    assert monotone < 0.1 * len(sentences)


def test_knobs() -> None:
    near = controlled_sentences(ControlledSpec(train=400, distance=0, distractors=0), "train")
    far = controlled_sentences(ControlledSpec(train=400, distance=4, distractors=3), "train")

    def longest(sentences: tuple[Sentence, ...], kind: str) -> int:
        return max(
            abs(t.head - i) for s in sentences for i, t in enumerate(s.source) if t.word_class == kind and t.head >= 0
        )

    assert longest(near, "adjective") == 1 and longest(far, "adjective") == 5
    assert longest(near, "adverb") == 1 and longest(far, "adverb") > 5
    assert not any(t.word_class == "preposition" for s in near for t in s.source)
    assert max(Counter(t.word_class for t in s.source)["preposition"] for s in far) == 3
    plain = ControlledSpec(train=50, senses=False)
    assert set(controlled_words(plain).target) >= {
        t.word for s in controlled_sentences(plain, "train") for t in s.target
    }


def test_deterministic_by_seed_and_a_longer_split_begins_with_the_shorter() -> None:
    short = controlled_sentences(ControlledSpec(train=30), "train")
    assert controlled_sentences(ControlledSpec(train=60), "train")[:30] == short
    assert controlled_sentences(ControlledSpec(train=30, seed=1), "train") != short
    assert controlled_sentences(ControlledSpec(valid=30), "valid") != short
    assert (
        short[0].pair[0]
        == "det0s adj17 adj23 adj20 noun3s prep11 det2p adj19 adj3 noun23p adv11 verb15 det2p adj11 adj3 noun7p"
    )


@pytest.mark.parametrize("shared", [True, False])
def test_words_stay_whole(tmp_path: object, shared: bool) -> None:
    spec = DataSpec(corpus="controlled", controlled=SPEC, shared_vocab=shared)
    corpus = load_corpus(spec)
    build_tokenizers(corpus.train, spec).save(str(tmp_path))
    tokenizers = Tokenizers.load(str(tmp_path))
    assert tokenizers.shared == shared
    for source, target in corpus.valid:
        for text, tokenizer in ((source, tokenizers.source), (target, tokenizers.target)):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text.split()) + 1 and ids[-1] == 2 and min(ids[:-1]) > 3
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    data = ParallelDataset.encode(corpus.valid, tokenizers, 64)
    assert len(data) == len(corpus.valid)


def test_annotations_of_the_validation_split_can_be_found() -> None:
    corpus = load_corpus(DataSpec(corpus="controlled", controlled=SPEC))
    assert [s.pair for s in controlled_sentences(SPEC, "valid")] == corpus.valid
    assert not set(corpus.train) & set(corpus.valid)


def test_mistakes_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"max_train_pairs is set, .*controlled\.train"):
        DataSpec(corpus="controlled", max_train_pairs=10)
    with pytest.raises(ValueError, match="controlled is set, but corpus='verses'"):
        DataSpec(corpus="verses", controlled=SPEC)
