"""Encoded sentence pairs, and batches of them as tensors.

Ids are kept flat in one array a side, so millions of pairs fit and a batch is cut out without a Python loop
over tokens. It must never truncate: what is too long is dropped, counted and reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qvattn.data.tokenizer import BOS_ID, PAD_ID, Tokenizers
from qvattn.errors import UserError

IGNORED_LABEL = -100
_CHUNK = 20_000


class Ragged:
    """Rows of different lengths in one flat array: `rows[i]` is a list of ids."""

    def __init__(self, flat: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> None:
        self.flat = flat
        self.lengths = lengths
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    @classmethod
    def of(cls, rows: Iterable[Sequence[int] | npt.NDArray[np.int32]]) -> Ragged:
        """Pack rows of ids."""
        arrays = [np.asarray(row, dtype=np.int32) for row in rows]
        lengths = np.array([len(row) for row in arrays], dtype=np.int64)
        return cls(np.concatenate(arrays) if arrays else np.empty(0, np.int32), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> list[int]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        row: list[int] = self.flat[self.starts[index] : self.starts[index + 1]].tolist()
        return row

    def select(self, rows: npt.NDArray[np.int64]) -> Ragged:
        """These rows, in this order."""
        lengths = self.lengths[rows]
        return Ragged(self.flat[self._positions(rows, lengths)], lengths)

    def padded(self, rows: npt.NDArray[np.int64], fill: int) -> npt.NDArray[np.int64]:
        """`(len(rows), longest)`, right-padded with `fill`."""
        lengths = self.lengths[rows]
        out = np.full((len(rows), int(lengths.max(initial=1))), fill, dtype=np.int64)
        out[np.arange(out.shape[1]) < lengths[:, None]] = self.flat[self._positions(rows, lengths)]
        return out

    def _positions(
        self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        positions: npt.NDArray[np.int64] = within + np.repeat(self.starts[rows], lengths)
        return positions


@dataclass(frozen=True, eq=False)
class ParallelDataset:
    """Pairs as ids; both sides end in eos.

    source, target: ragged rows of ids. kept: index of each row in the pairs given to `encode` (`(N,)`).
    dropped: counts by reason (`too_long`, `empty`).
    """

    source: Ragged
    target: Ragged
    kept: npt.NDArray[np.int64]
    dropped: dict[str, int]

    @classmethod
    def encode(
        cls,
        pairs: Sequence[tuple[str, str]],
        tokenizers: Tokenizers,
        max_length: int | None = None,
        name: str = "data",
    ) -> ParallelDataset:
        """Encode pairs; one with a side longer than `max_length` tokens (eos included) is dropped and counted.

        Raises `UserError`, naming the split `name` and the counts, if nothing is left.
        """
        source = _encode([pair[0] for pair in pairs], tokenizers.source)
        target = _encode([pair[1] for pair in pairs], tokenizers.target)
        empty = np.minimum(source.lengths, target.lengths) < 2
        longest = np.maximum(source.lengths, target.lengths)
        long = ~empty & (longest > max_length) if max_length is not None else np.zeros_like(empty)
        kept = np.flatnonzero(~(empty | long)).astype(np.int64)
        dropped = {"too_long": int(long.sum()), "empty": int(empty.sum())}
        if not len(kept):
            raise UserError(
                f"{name}: none of {len(pairs)} pairs is left "
                f"(too_long={dropped['too_long']} with max_length={max_length}, empty={dropped['empty']})"
            )
        return cls(source.select(kept), target.select(kept), kept, dropped)

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """`(N, 2)`: source and target tokens of each pair, eos included."""
        return np.stack([self.source.lengths, self.target.lengths], axis=1)

    @property
    def target_tokens(self) -> int:
        """Target tokens in all pairs, eos included."""
        return int(self.target.lengths.sum())


def collate(dataset: ParallelDataset, indices: Sequence[int]) -> dict[str, Tensor]:
    """A batch as int64 tensors, right-padded.

    input_ids, attention_mask `(B, S)`; decoder_input_ids (bos first), labels (eos last, then -100) `(B, T)`.
    No indices at all give one row of padding without a label, so that a process without work in a step can
    take part in it.
    """
    if not len(indices):
        pad = torch.full((1, 1), PAD_ID)
        labels = torch.full((1, 1), IGNORED_LABEL)
        return {
            "input_ids": pad,
            "attention_mask": pad * 0,
            "decoder_input_ids": pad.clone(),
            "labels": labels,
        }
    rows = np.asarray(indices, dtype=np.int64)
    source = dataset.source.padded(rows, PAD_ID)
    labels_np = dataset.target.padded(rows, IGNORED_LABEL)
    mask = np.arange(source.shape[1]) < dataset.source.lengths[rows][:, None]
    decoder = np.full_like(labels_np, PAD_ID)
    decoder[:, 0] = BOS_ID
    decoder[:, 1:] = np.where(labels_np[:, 1:] == IGNORED_LABEL, PAD_ID, labels_np[:, :-1])
    return {
        "input_ids": torch.from_numpy(source),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "decoder_input_ids": torch.from_numpy(decoder),
        "labels": torch.from_numpy(labels_np),
    }


def _encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Ragged:
    core = tokenizer.backend_tokenizer
    rows: list[npt.NDArray[np.int32]] = []
    for start in range(0, len(texts), _CHUNK):
        encoded = core.encode_batch_fast(list(texts[start : start + _CHUNK]))
        rows.extend(np.asarray(one.ids, dtype=np.int32) for one in encoded)
    return Ragged.of(rows)
