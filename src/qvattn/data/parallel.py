"""Encoded sentence pairs, and batches of them as tensors.

It must never truncate: a pair that is too long is dropped, counted and reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import UserError
from .ragged import Ragged, encode_texts
from .tokenizer import BOS_ID, PAD_ID, Tokenizers

IGNORED_LABEL = -100


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
    name: str = "data"

    @classmethod
    def encode(
        cls,
        pairs: Sequence[tuple[str, str]],
        tokenizers: Tokenizers,
        max_length: int | None = None,
        name: str = "data",
    ) -> ParallelDataset:
        """Encode pairs; one with a side over `max_length` tokens (eos included) is dropped and counted.

        Raises `UserError`, naming the split `name` and the counts, if nothing is left.
        """
        source = encode_texts([pair[0] for pair in pairs], tokenizers.source)
        target = encode_texts([pair[1] for pair in pairs], tokenizers.target)
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
        return cls(source.select(kept), target.select(kept), kept, dropped, name)

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """`(N, 2)`: source and target tokens of each pair, eos included."""
        return np.stack([self.source.lengths, self.target.lengths], axis=1)

    @property
    def notes(self) -> dict[str, int]:
        """What was dropped, in the form of `Corpus.notes`: `train_dropped_too_long` and its like."""
        return {f"{self.name}_dropped_{reason}": count for reason, count in self.dropped.items() if count}

    def target_tokens(self, indices: Sequence[int]) -> int:
        """Target tokens of these pairs, eos included, padding not."""
        return int(self.target.lengths[np.asarray(indices, dtype=np.int64)].sum())

    def collate(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """See `collate`."""
        return collate(self, indices)


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
