"""A hub corpus that is streamed from its host through the tokenizer to disk; its text is never in memory.

The tokenizer is learned from the first rows. Then rows are encoded as they come, a few thousand at a time, and appended
to arrays that training maps: so the order of batches is a function of (seed, epoch) as for every corpus, on any number
of processes, and a run that is resumed neither repeats nor misses a row. Validation and test splits are small: their
text is kept. Nothing is shuffled or guessed here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data import DataSpec, Tokenizers, build_text_tokenizer, build_tokenizers
from ..data.hub import stream_hub_rows
from ..data.ragged import encode_texts
from ..errors import UserError
from .encoded import FACTS, Notes, new_draft, publish, save_array

CHUNK = 5_000
"""Rows encoded at a time."""

FIRST_ROWS = 200_000
"""The first rows of the training split: a tokenizer is learned from them, `valid_fraction` holds out some of them."""

Row = tuple[str, ...]
"""Source and target, or a document alone."""


def write_streamed(folder: Path, spec: DataSpec, tokenizers: Tokenizers | None) -> None:
    """Encode the corpus to `folder`, unless that was done for the same `spec`; with `tokenizers`, if given.

    Raises `UserError` when nothing is left to train on or to validate with.
    """
    assert spec.hub is not None
    key = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
    if _done(folder, key):
        return
    tokenizers = tokenizers or _learn(islice(_rows(spec, "train", {}), FIRST_ROWS), spec)
    draft = new_draft(folder)
    notes: Notes = {"corpus": spec.hub.name, "streamed": 1}
    held_out = {split: list(_rows(spec, split, notes)) for split in ("valid", "test")}
    for split, rows in (*held_out.items(), ("train", _rows(spec, "train", notes))):
        write = _write_pairs if spec.corpus == "hub" else _write_blocks
        write(draft, split, rows, tokenizers, spec, notes)
    for split in ("train", "valid"):
        if not notes[f"{split}_rows"]:
            said = ", ".join(f"{name}={value}" for name, value in notes.items())
            raise UserError(f"data.corpus={spec.corpus!r}: nothing is left of the {split} split ({said})")
    pairs = {f"{split}_pairs": rows if spec.corpus == "hub" else [] for split, rows in held_out.items()}
    publish(draft, folder, tokenizers=tokenizers, facts={"key": key, "notes": notes, **pairs})


def _done(folder: Path, key: str) -> bool:
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and facts.get("key") == key


def _learn(rows: Iterable[Row], spec: DataSpec) -> Tokenizers:
    if spec.corpus == "hub":
        return build_tokenizers([(row[0], row[1]) for row in rows], spec)
    tokenizer = build_text_tokenizer([row[0] for row in rows], spec)
    return Tokenizers(tokenizer, tokenizer)


def _rows(spec: DataSpec, split: str, notes: Notes) -> Iterator[Row]:
    """The rows of a split, cleaned; without a validation split, `valid_fraction` parts it from the training rows."""
    assert spec.hub is not None
    streams = stream_hub_rows(spec.hub, spec.max_train_pairs, pairs=spec.corpus == "hub")
    every = round(1 / spec.valid_fraction) if spec.valid_fraction else None
    if "valid" in streams and every:
        raise UserError(
            f"data.valid_fraction={spec.valid_fraction}, but the corpus has a validation split; drop one of them "
            "(hub.valid_split=null leaves the split unused)"
        )
    if "valid" not in streams and not every:
        raise UserError(
            f"data.corpus={spec.corpus!r} has no validation data: name some, or set data.valid_fraction=0.02"
        )
    stream = streams.get(split, iter(()))
    if every and split == "valid":
        stream = (row for i, row in enumerate(islice(streams["train"], FIRST_ROWS)) if _is_held_out(i, every))
    elif every and split == "train":
        stream = (row for i, row in enumerate(streams["train"]) if not _is_held_out(i, every))
    return _cleaned(stream, split, spec, notes)


def _is_held_out(index: int, every: int) -> bool:
    return index < FIRST_ROWS and index % every == every // 2


def _cleaned(rows: Iterable[Row], split: str, spec: DataSpec, notes: Notes) -> Iterator[Row]:
    empty = 0
    for row in rows:
        stripped = tuple(text.strip().lower() if spec.lowercase else text.strip() for text in row)
        if all(stripped):
            yield stripped
        else:
            empty += 1
    if empty:
        notes[f"{split}_dropped_empty"] = empty


def _chunks(rows: Iterable[Row]) -> Iterator[Sequence[Row]]:
    stream = iter(rows)
    while chunk := list(islice(stream, CHUNK)):
        yield chunk


def _write_pairs(
    draft: Path, split: str, rows: Iterable[Row], tokenizers: Tokenizers, spec: DataSpec, notes: Notes
) -> None:
    """Both sides as flat ids and lengths; a pair with a side that is too long is dropped and counted."""
    sides = ("source", "target")
    flat = {side: _Growing(draft, f"{split}.{side}") for side in sides}
    lengths: dict[str, list[npt.NDArray[np.int64]]] = {side: [np.empty(0, np.int64)] for side in sides}
    long = 0
    for chunk in _chunks(rows):
        encoded = [encode_texts([row[i] for row in chunk], getattr(tokenizers, side)) for i, side in enumerate(sides)]
        fits = np.maximum(encoded[0].lengths, encoded[1].lengths) <= spec.max_length
        long += int((~fits).sum())
        kept = np.flatnonzero(fits).astype(np.int64)
        for side, ids in zip(sides, encoded, strict=True):
            flat[side].add(ids.select(kept).flat)
            lengths[side].append(ids.lengths[kept])
    total = {side: np.concatenate(lengths[side]) for side in sides}
    notes[f"{split}_rows"] = len(total["source"])
    if long:
        notes[f"{split}_dropped_too_long"] = long
    for side in sides:
        flat[side].close(width=None)
        if len(total[side]):
            save_array(draft, f"{split}.{side}.lengths", total[side])


def _write_blocks(
    draft: Path, split: str, rows: Iterable[Row], tokenizers: Tokenizers, spec: DataSpec, notes: Notes
) -> None:
    """Documents end to end, cut into blocks."""
    flat = _Growing(draft, split)
    documents = 0
    for chunk in _chunks(rows):
        flat.add(encode_texts([row[0] for row in chunk], tokenizers.target).flat)
        documents += len(chunk)
    notes[f"{split}_documents"] = documents
    notes[f"{split}_rows"] = flat.length // spec.block_size
    notes[f"{split}_dropped_tokens"] = flat.length % spec.block_size
    flat.close(width=spec.block_size)


class _Growing:
    """An array on disk that grows: raw numbers at first, an .npy file once it is closed (none if it holds nothing)."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.length = folder, name, 0
        self.raw = folder / f"{name}.raw"
        self._file = self.raw.open("wb")

    def add(self, ids: npt.NDArray[np.int32]) -> None:
        self._file.write(ids.astype(np.int32, copy=False).tobytes())
        self.length += len(ids)

    def close(self, *, width: int | None) -> None:
        """One long row, or rows of `width`; what does not fill a row is left out."""
        self._file.close()
        used = self.length - (self.length % width if width else 0)
        if used:
            flat: npt.NDArray[Any] = np.memmap(self.raw, np.int32, mode="r", shape=(used,))
            save_array(self.folder, self.name, flat.reshape(-1, width) if width else flat)
        self.raw.unlink()
