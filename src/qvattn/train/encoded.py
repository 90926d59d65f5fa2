"""A corpus as ids, and the same on disk: written once, mapped into memory by every process that reads its part of it.

The files are NumPy arrays and one JSON file; nothing in them is ever unpickled. A folder appears when all of it is
there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data import ParallelDataset, TextDataset, Tokenizers, collate, collate_text
from ..data.ragged import Ragged
from ..data.synthetic.mqar import MqarDataset
from ..errors import UserError
from ..files import DRAFT, delete, flush
from .loop import Batch

ENCODED = "encoded"
"""The folder's name in a run directory. It is deleted when the run is complete."""

FACTS = "facts.json"
SPLITS = ("train", "valid", "test")

Notes = dict[str, int | str]
Pairs = Sequence[tuple[str, str]]


class PairData:
    """Sentence pairs as the loop sees them."""

    def __init__(self, dataset: ParallelDataset) -> None:
        self.dataset = dataset
        self.lengths = dataset.lengths
        self._target = dataset.target.lengths

    def collate(self, indices: Sequence[int]) -> Batch:
        return collate(self.dataset, indices)

    def target_tokens(self, indices: Sequence[int]) -> int:
        return int(self._target[indices].sum())


class BlockData:
    """Blocks of text as the loop sees them; the first token of a block has nothing to be predicted from."""

    def __init__(self, dataset: TextDataset) -> None:
        self.dataset = dataset
        self.lengths = dataset.lengths

    def collate(self, indices: Sequence[int]) -> Batch:
        return collate_text(self.dataset, indices)

    def target_tokens(self, indices: Sequence[int]) -> int:
        return len(indices) * (self.dataset.blocks.shape[1] - 1)


Encoded = PairData | BlockData | MqarDataset


@dataclass(frozen=True, kw_only=True)
class EncodedData:
    """A corpus as ids; `test` is None when the corpus has no test split."""

    tokenizers: Tokenizers
    train: Encoded
    valid: Encoded
    test: Encoded | None
    notes: Notes
    valid_pairs: Pairs = ()
    test_pairs: Pairs = ()


def write_encoded(folder: Path, data: EncodedData) -> None:
    """Write a corpus of pairs or blocks to `folder`, in the place of what is there."""
    draft = new_draft(folder)
    for split in SPLITS:
        part = getattr(data, split)
        if isinstance(part, PairData):
            for side in ("source", "target"):
                rows: Ragged = getattr(part.dataset, side)
                save_array(draft, f"{split}.{side}", rows.flat)
                save_array(draft, f"{split}.{side}.lengths", rows.lengths)
        elif isinstance(part, BlockData):
            save_array(draft, split, part.dataset.blocks)
    publish(draft, folder, tokenizers=data.tokenizers, facts=_facts(data))


def read_encoded(folder: Path) -> EncodedData:
    """What `write_encoded` wrote, its arrays mapped and not read. Raises `UserError` when it is damaged."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        splits = {split: _split(folder, split) for split in SPLITS}
        pairs = {split: [(source, target) for source, target in facts[f"{split}_pairs"]] for split in SPLITS[1:]}
        notes: Notes = facts["notes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} cannot be read ({error}); delete it, and the corpus is encoded anew") from error
    train, valid = splits["train"], splits["valid"]
    if train is None or valid is None:
        raise UserError(f"{folder} lacks the training or validation split; delete it, and the corpus is encoded anew")
    return EncodedData(
        tokenizers=Tokenizers.load(folder),
        train=train,
        valid=valid,
        test=splits["test"],
        notes=notes,
        valid_pairs=pairs["valid"],
        test_pairs=pairs["test"],
    )


def new_draft(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled and then published."""
    draft = folder.with_name(f"{DRAFT}{folder.name}")
    delete(draft)
    draft.mkdir()
    return draft


def publish(draft: Path, folder: Path, *, tokenizers: Tokenizers, facts: Mapping[str, Any]) -> None:
    """Give the draft its name, after what belongs to every corpus."""
    tokenizers.save(draft)
    (draft / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    for file in draft.iterdir():
        flush(file)
    delete(folder)
    draft.rename(folder)


def save_array(folder: Path, name: str, array: npt.NDArray[Any]) -> None:
    """Write one array so that it can be mapped."""
    np.save(folder / f"{name}.npy", array, allow_pickle=False)


def _split(folder: Path, split: str) -> PairData | BlockData | None:
    if (folder / f"{split}.npy").is_file():
        return BlockData(TextDataset(_map(folder, split), 0))
    if not (folder / f"{split}.source.npy").is_file():
        return None
    sides = [
        Ragged(_map(folder, f"{split}.{side}"), np.array(_map(folder, f"{split}.{side}.lengths")))
        for side in ("source", "target")
    ]
    kept = np.arange(len(sides[0]), dtype=np.int64)
    return PairData(ParallelDataset(sides[0], sides[1], kept, {}, split))


def _map(folder: Path, name: str) -> npt.NDArray[Any]:
    path = folder / f"{name}.npy"
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _facts(data: EncodedData) -> dict[str, Any]:
    return {"notes": data.notes, "valid_pairs": list(data.valid_pairs), "test_pairs": list(data.test_pairs)}
