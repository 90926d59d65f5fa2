"""Rows of ids of different lengths, flat in one array.

Millions of sentences fit, and a padded batch is cut out without a Python loop over tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

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

    def _positions(self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        positions: npt.NDArray[np.int64] = within + np.repeat(self.starts[rows], lengths)
        return positions


def encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Ragged:
    """Ids of each text, eos at its end."""
    core = tokenizer.backend_tokenizer
    rows: list[npt.NDArray[np.int32]] = []
    for start in range(0, len(texts), _CHUNK):
        encoded = core.encode_batch_fast(list(texts[start : start + _CHUNK]))
        rows.extend(np.asarray(one.ids, dtype=np.int32) for one in encoded)
    return Ragged.of(rows)
