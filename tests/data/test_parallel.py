"""Encoded pairs and their batches, compared with the plainest way to build them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qvattn import UserError
from qvattn.data import BOS_ID, EOS_ID, DataSpec, ParallelDataset, build_tokenizers, collate
from qvattn.data.ragged import Ragged

PAIRS = [("a b c", "A B"), ("one two three four five six", "eins"), ("x", "X Y Z"), ("", "leer"), ("q", "Q" * 50)]


@pytest.fixture(scope="module")
def toks():
    return build_tokenizers(PAIRS[:4], DataSpec(vocab_size=300))


@pytest.fixture(scope="module")
def data(toks):
    return ParallelDataset.encode(PAIRS, toks, max_length=40)


def test_what_is_too_long_or_empty_is_dropped_counted_and_traceable(data, toks):
    assert data.dropped == {"too_long": 1, "empty": 1}
    assert data.notes == {"data_dropped_too_long": 1, "data_dropped_empty": 1}
    assert data.kept.tolist() == [0, 1, 2]
    assert len(data) == 3
    assert data.source[1] == toks.source(PAIRS[1][0]).input_ids
    assert all(row[-1] == EOS_ID for row in (*data.source, *data.target))
    assert data.lengths.tolist() == [[len(s), len(t)] for s, t in zip(data.source, data.target, strict=True)]
    assert data.target_tokens([0, 2]) == len(data.target[0]) + len(data.target[2])


def test_max_length_counts_eos(toks):
    length = len(toks.source(PAIRS[0][0]).input_ids)
    assert len(ParallelDataset.encode(PAIRS[:1], toks, max_length=length)) == 1
    with pytest.raises(UserError, match=rf"train: none of 1 pairs is left \(too_long=1 with max_length={length - 1}"):
        ParallelDataset.encode(PAIRS[:1], toks, max_length=length - 1, name="train")


@pytest.mark.parametrize("indices", [[0, 1, 2], [2], [1, 0], [0, 0]])
def test_collate_equals_the_plain_loop(data, indices):
    batch = collate(data, indices)
    sources, targets = [data.source[i] for i in indices], [data.target[i] for i in indices]
    width, length = max(map(len, sources)), max(map(len, targets))
    wanted = {
        "input_ids": [row + [0] * (width - len(row)) for row in sources],
        "attention_mask": [[1] * len(row) + [0] * (width - len(row)) for row in sources],
        "decoder_input_ids": [[BOS_ID, *row[:-1]] + [0] * (length - len(row)) for row in targets],
        "labels": [row + [-100] * (length - len(row)) for row in targets],
    }
    assert batch.keys() == wanted.keys()
    for key, rows in wanted.items():
        assert batch[key].dtype == torch.int64
        assert batch[key].tolist() == rows
    assert all(torch.equal(batch[key], value) for key, value in data.collate(indices).items())


def test_no_indices_give_one_row_without_labels(data):
    batch = collate(data, [])
    assert batch["input_ids"].shape == batch["labels"].shape == (1, 1)
    assert batch["attention_mask"].sum() == 0
    assert (batch["labels"] == -100).all()
    assert data.target_tokens([]) == 0


@given(rows=st.lists(st.lists(st.integers(0, 1000), max_size=9), max_size=12), pick=st.data())
def test_ragged_rows(rows, pick):
    ragged = Ragged.of(rows)
    assert list(ragged) == rows
    if rows:
        chosen = np.array(pick.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1)), dtype=np.int64)
        assert list(ragged.select(chosen)) == [rows[i] for i in chosen]
        padded = ragged.padded(chosen, -1)
        assert [[x for x in row if x != -1] for row in padded.tolist()] == [rows[i] for i in chosen]
        assert ragged[-1] == rows[-1]
