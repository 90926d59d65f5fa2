"""Loading parallel corpora: alignment, counting, and errors that name file, line and counts."""

import gzip

import pytest

from qvattn import UserError
from qvattn.data import DataSpec, load_corpus


def write(folder, name, content):
    path = folder / name
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


def files(folder, source, target, **more):
    fields = {"train_source": write(folder, "t.en", source), "train_target": write(folder, "t.de", target)}
    return DataSpec(corpus="files", **fields, **more)


def with_valid(folder, source, target, **more):
    valid = {"valid_source": write(folder, "v.en", "v\n"), "valid_target": write(folder, "v.de", "w\n")}
    return files(folder, source, target, **valid, **more)


def test_aligned_files_plain_and_gz(tmp_path):
    spec = DataSpec(
        corpus="files",
        train_source=write(tmp_path, "t.en.gz", "a house\ntwo\n"),
        train_target=write(tmp_path, "t.de", "ein Haus\nzwei"),
        valid_source=write(tmp_path, "v.en", "x\n"),
        valid_target=write(tmp_path, "v.de", "y\n"),
    )
    corpus = load_corpus(spec)
    assert corpus.train == [("a house", "ein Haus"), ("two", "zwei")]
    assert corpus.valid == [("x", "y")]
    assert corpus.test == []
    assert corpus.notes["train_pairs"] == 2


def test_only_line_feeds_end_lines(tmp_path):
    odd = "one\u2028still\x0bone\x0cone\x85one\x1eone"
    corpus = load_corpus(with_valid(tmp_path, f"{odd}\r\ntwo\r\n", b"\xef\xbb\xbfeins\nzwei\n"))
    assert corpus.train == [(odd, "eins"), ("two", "zwei")]


def test_empty_sides_are_dropped_and_counted(tmp_path):
    corpus = load_corpus(with_valid(tmp_path, "a\n\n  \nd\n", "A\nB\nC\n\n"))
    assert corpus.train == [("a", "A")]
    assert corpus.notes["train_dropped_empty"] == 3


def test_different_line_counts_name_both(tmp_path):
    with pytest.raises(UserError, match=r"t\.en has 3 lines, .*t\.de has 2") as caught:
        load_corpus(with_valid(tmp_path, "a\nb\nc\n", "A\nB\n"))
    assert "train_source" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (b"fine\nbad \xff here\n", r"t\.en, line 2: not UTF-8 \(byte 0xff at byte 5"),
        (b"cut \xc3", r"line 1: not UTF-8"),
        (b"", r"t\.en is empty"),
        ("a\n".encode("utf-16"), "UTF-16"),
        (gzip.compress(b"a\n", mtime=0), r"must end in \.gz"),
    ],
)
def test_bad_bytes_name_file_and_line(tmp_path, source, says):
    with pytest.raises(UserError, match=says):
        load_corpus(with_valid(tmp_path, source, "A\nB\n"))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"plain text", lambda data: data[:20] + b"xxxx" + data[24:]]
)
def test_broken_gzip(tmp_path, damage):
    path = tmp_path / "t.en.gz"
    path.write_bytes(damage(gzip.compress(bytes(range(65, 91)) * 40 + b"\n")))
    with pytest.raises(UserError, match=r"t\.en\.gz is not a whole gzip file"):
        load_corpus(DataSpec(corpus="files", train_source=str(path), train_target=str(path)))


def test_missing_file_folder_and_variable(tmp_path, monkeypatch):
    there = write(tmp_path, "t.de", "A\n")
    with pytest.raises(UserError, match=r"data\.train_source: .*nowhere does not exist"):
        load_corpus(DataSpec(corpus="files", train_source=str(tmp_path / "nowhere"), train_target=there))
    with pytest.raises(UserError, match="is a folder"):
        load_corpus(DataSpec(corpus="files", train_source=str(tmp_path), train_target=there))
    monkeypatch.delenv("NO_SUCH_PLACE", raising=False)
    with pytest.raises(UserError, match=r"data\.train_source='\$NO_SUCH_PLACE/x'.*NO_SUCH_PLACE is not set"):
        load_corpus(DataSpec(corpus="files", train_source="$NO_SUCH_PLACE/x", train_target=there))


def test_paths_expand_variables_and_start_at_the_current_folder(tmp_path, monkeypatch):
    spec = with_valid(tmp_path, "a\n", "A\n")
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    moved = spec.model_copy(update={"train_source": "${PLACE}/t.en", "train_target": "t.de"})
    assert load_corpus(moved).train == [("a", "A")]


def test_nothing_left_gives_counts_by_reason(tmp_path):
    with pytest.raises(UserError, match=r"no training pair is left.*train_dropped_empty=2"):
        load_corpus(with_valid(tmp_path, "\n \n", "A\nB\n"))


def test_validation_files_with_nothing_in_them(tmp_path):
    spec = with_valid(tmp_path, "a\n", "A\n")
    write(tmp_path, "v.en", " \n")
    with pytest.raises(UserError, match=r"no validation data is left \(valid_dropped_empty=1\)"):
        load_corpus(spec)


def test_valid_fraction_is_spread_deterministic_and_keeps_no_copy(tmp_path):
    lines = [f"s{i}" for i in range(98)] + ["same", "same"]
    text = "\n".join(lines) + "\n"
    spec = files(tmp_path, text, text.upper(), valid_fraction=0.05)
    first, second = load_corpus(spec), load_corpus(spec)
    assert first == second
    assert [source for source, _ in first.valid] == ["s10", "s30", "s50", "s70", "s90"]
    assert first.notes["valid_held_out"] == 5
    assert len(first.train) == 95
    half = load_corpus(spec.model_copy(update={"valid_fraction": 0.499}))
    assert not set(half.train) & set(half.valid)
    assert half.notes["train_dropped_also_held_out"] == 1


def test_a_split_that_was_given_stays_as_it_is_but_overlap_is_counted(tmp_path):
    corpus = load_corpus(with_valid(tmp_path, "v\na\n", "w\nA\n"))
    assert len(corpus.train) == 2
    assert corpus.notes["train_also_held_out"] == 1


def test_no_validation_data_and_too_small_fraction(tmp_path):
    with pytest.raises(UserError, match="no validation data"):
        load_corpus(files(tmp_path, "a\nb\n", "A\nB\n"))
    with pytest.raises(UserError, match=r"valid_fraction=0\.1 of 2 leaves no"):
        load_corpus(files(tmp_path, "a\nb\n", "A\nB\n", valid_fraction=0.1))


def test_limit_is_spread_over_the_corpus_and_lowercase_applies(tmp_path):
    text = "\n".join(f"S{i}" for i in range(10)) + "\n"
    corpus = load_corpus(with_valid(tmp_path, text, text, max_train_pairs=3, lowercase=True))
    assert [source for source, _ in corpus.train] == ["s0", "s3", "s6"]


def test_tsv(tmp_path):
    train = write(tmp_path, "t.tsv", "a\tA\n\nb\tB\n")
    valid = write(tmp_path, "v.tsv", "x\ty\n")
    corpus = load_corpus(DataSpec(corpus="tsv", train_tsv=train, valid_tsv=valid))
    assert corpus.train == [("a", "A"), ("b", "B")]
    assert corpus.notes["train_dropped_empty"] == 1
    wide = write(tmp_path, "w.tsv", "1\ta\tA\textra\n2\tb\tB\textra\n")
    spec = DataSpec(corpus="tsv", train_tsv=wide, valid_tsv=wide, tsv_columns=(2, 1))
    assert load_corpus(spec).train == [("A", "a"), ("B", "b")]


@pytest.mark.parametrize("line", ["no tab", "a\tb\tc"])
def test_tsv_columns_that_do_not_fit(tmp_path, line):
    path = write(tmp_path, "t.tsv", f"a\tA\n{line}\n")
    with pytest.raises(UserError, match=r"t\.tsv, line 2: \d tab-separated columns, 2 are needed"):
        load_corpus(DataSpec(corpus="tsv", train_tsv=path, valid_tsv=path))


def test_text_corpora_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds plain text"):
        load_corpus(DataSpec(corpus="kjv"))
