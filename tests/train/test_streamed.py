"""Hub corpora that are streamed through the tokenizer to disk: local files, read as `datasets` streams them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from qvattn.data import DataSpec, HubSpec, Tokenizers
from qvattn.errors import UserError
from qvattn.train import streamed
from qvattn.train.encoded import ENCODED, BlockData, PairData, read_encoded
from qvattn.train.prepare import encode
from qvattn.train.recipe import Recipe, read_recipe
from qvattn.train.run import run_training
from qvattn.train.streamed import write_streamed

from .test_resume import assert_same_run

WORDS = ("old", "man", "sees", "the", "big", "red", "house", "by", "a", "river")


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * 7 + i * i) % 10] for i in range(3 + number % 6))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs in Parquet files, one of them blank, one too long."""
    folder = tmp_path_factory.mktemp("pairs")
    for split, count in (("train", 90), ("validation", 12), ("test", 9)):
        sources = [sentence(i) for i in range(count)]
        if split == "train":
            sources[4], sources[7] = "  ", "man " * 200
        rows = {"en": sources, "de": [text[::-1] for text in sources]}
        pq.write_table(pa.table(rows), folder / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents, in two files of the training split, without a validation split."""
    folder = tmp_path_factory.mktemp("text")
    for part in range(2):
        rows = [json.dumps({"text": sentence(60 * part + i)}) for i in range(60)]
        (folder / f"train-{part:05d}-of-00002.jsonl").write_text("\n".join(rows))
    return folder


def pairs_spec(folder: Path, **more: object) -> DataSpec:
    hub = HubSpec(name=str(folder), streaming=bool(more.pop("streaming", True)))
    return DataSpec(corpus="hub", hub=hub, vocab_size=300, max_length=60, **more)  # type: ignore[arg-type]


def recipe_for(data: DataSpec, task: str, *overrides: str) -> Recipe:
    model = {"d_model": 16, "d_ff": 32, "n_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    train = {"steps": 6, "validate_every": 3, "report_every": 1, "tensorboard": False, "device": "cpu"}
    content = {"name": "streamed", "task": task, "data": data.model_dump(mode="json"), "model": model, "train": train}
    return read_recipe(yaml.safe_dump(content), origin="test", overrides=overrides)


@pytest.mark.parametrize("chunk", [7, 5000])
def test_pairs_are_those_that_memory_would_hold(
    parquet: Path, tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "CHUNK", chunk)
    write_streamed(tmp_path / "encoded", pairs_spec(parquet), None)
    found = read_encoded(tmp_path / "encoded")
    expected = encode(recipe_for(pairs_spec(parquet, streaming=False), "translation"))
    assert found.tokenizers.source.backend_tokenizer.to_str() == expected.tokenizers.source.backend_tokenizer.to_str()
    for split in ("train", "valid", "test"):
        a, b = getattr(found, split), getattr(expected, split)
        assert isinstance(a, PairData) and isinstance(b, PairData)
        assert isinstance(a.dataset.source.flat, np.memmap)
        for side in ("source", "target"):
            assert np.array_equal(getattr(a.dataset, side).flat, getattr(b.dataset, side).flat)
            assert np.array_equal(getattr(a.dataset, side).lengths, getattr(b.dataset, side).lengths)
    assert found.notes["train_dropped_empty"] == found.notes["train_dropped_too_long"] == 1
    assert found.notes["train_rows"] == 88
    assert found.valid_pairs == expected.valid_pairs


def test_blocks_with_a_share_held_out(jsonl: Path, tmp_path: Path) -> None:
    """Every tenth of the first documents is for validation; each document is in one split, in its order."""
    hub = HubSpec(name=str(jsonl), streaming=True)
    spec = DataSpec(corpus="hub-text", hub=hub, vocab_size=300, block_size=8, valid_fraction=0.1)
    write_streamed(tmp_path / "encoded", spec, None)
    found = read_encoded(tmp_path / "encoded")
    tokenizer = found.tokenizers.target
    documents = [sentence(i) for i in range(120)]
    held_out = documents[5::10]
    kept = [document for i, document in enumerate(documents) if i % 10 != 5]
    for part, texts in ((found.train, kept), (found.valid, held_out)):
        assert isinstance(part, BlockData)
        ids = [i for text in texts for i in tokenizer(text)["input_ids"]]
        assert part.dataset.blocks.tolist() == [ids[i : i + 8] for i in range(0, len(ids) - 7, 8)]
    assert found.notes["train_documents"] == 108 and found.notes["valid_documents"] == 12


def test_limit_and_given_tokenizer(parquet: Path, tmp_path: Path) -> None:
    write_streamed(tmp_path / "first", pairs_spec(parquet), None)
    tokenizers = Tokenizers.load(tmp_path / "first")
    write_streamed(tmp_path / "second", pairs_spec(parquet, max_train_pairs=20), tokenizers)
    found = read_encoded(tmp_path / "second")
    assert found.notes["train_rows"] == 18
    assert len(found.tokenizers.source) == len(tokenizers.source)


def test_a_resumed_run_does_not_read_the_hub_again(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = HubSpec(name=str(jsonl), streaming=True)
    spec = DataSpec(corpus="hub-text", hub=hub, vocab_size=300, block_size=8, max_tokens=64, valid_fraction=0.1)
    recipe = recipe_for(spec, "causal-lm")
    run_training(recipe, tmp_path / "whole")
    assert not (tmp_path / "whole" / ENCODED).exists()  # complete: not kept
    run_training(recipe, tmp_path / "parts", stop_at=2)
    assert (tmp_path / "parts" / ENCODED / "train.npy").is_file()
    monkeypatch.setattr(streamed, "stream_hub_rows", None)
    run_training(recipe, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_refusals(jsonl: Path, parquet: Path, tmp_path: Path) -> None:
    hub = HubSpec(name=str(jsonl), streaming=True)
    with pytest.raises(UserError, match=r"no validation data.*valid_fraction"):
        write_streamed(tmp_path / "a", DataSpec(corpus="hub-text", hub=hub, vocab_size=300), None)
    with pytest.raises(UserError, match="has a validation split"):
        write_streamed(tmp_path / "a", pairs_spec(parquet, valid_fraction=0.1), None)
    text = DataSpec(corpus="hub-text", hub=hub, vocab_size=300, valid_fraction=0.1)
    column = text.model_copy(update={"hub": hub.model_copy(update={"text_column": "body"})})
    with pytest.raises(UserError, match=r"hub\.text_column='body'.*\['text'\]"):
        write_streamed(tmp_path / "a", column, None)
    with pytest.raises(UserError, match=r"nothing is left of the train split .*train_dropped_tokens=\d+"):
        write_streamed(tmp_path / "a", text.model_copy(update={"block_size": 5000}), None)
    assert not (tmp_path / "a").exists()


def test_a_stream_that_breaks_off_is_named(jsonl: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    rows = [json.dumps({"text": sentence(i)}) for i in range(30)]
    (folder / "train.jsonl").write_text("\n".join(rows) + '\n{"text": "cut o')
    hub = HubSpec(name=str(folder), streaming=True)
    spec = DataSpec(corpus="hub-text", hub=hub, vocab_size=300, block_size=8, valid_fraction=0.1)
    with pytest.raises(UserError, match=r"train split broke"):
        write_streamed(tmp_path / "a", spec, None)
    assert not (tmp_path / "a").exists()


def test_damaged_folder_is_named(parquet: Path, tmp_path: Path) -> None:
    write_streamed(tmp_path / "encoded", pairs_spec(parquet), None)
    file = tmp_path / "encoded/train.source.npy"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(UserError, match="delete it, and the corpus is encoded anew"):
        read_encoded(tmp_path / "encoded")
