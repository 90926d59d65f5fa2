"""Plain text for causal language models: documents, and packed blocks of tokens.

A document is a non-empty line of a file, a row of a hub corpus, or a chapter of the King James text; each ends in
eos. Documents are laid end to end and cut into blocks of one length, so no batch holds padding. The same promises
as for pairs: nothing is dropped uncounted, and `BatchPlan` alone decides the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ..errors import UserError
from .corpus import check_validation, evenly, hold_out
from .hub import load_hub_texts
from .lines import read_lines, resolve
from .parallel import IGNORED_LABEL
from .ragged import encode_texts
from .spec import DataSpec
from .synthetic.mqar import MqarSpec, mqar_texts
from .tokenizer import PAD_ID, train_tokenizer
from .verses import load_chapters


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """Documents by split; `notes` holds what was counted. `test` may be empty."""

    train: list[str]
    valid: list[str]
    test: list[str]
    name: str
    notes: dict[str, int | str] = field(default_factory=dict)


def load_text(spec: DataSpec) -> TextCorpus:
    """Load and split the text corpus that `spec` names. Errors are `UserError`s that name the file or field."""
    if not spec.is_text:
        raise UserError(f"data.corpus={spec.corpus!r} holds sentence pairs: text, hub-text or kjv is needed")
    raw, notes = _read(spec)
    splits: dict[str, list[str]] = {}
    for split in ("train", "valid", "test"):
        documents = [document.strip() for document in raw.get(split, [])]
        if spec.lowercase:
            documents = [document.lower() for document in documents]
        splits[split] = [document for document in documents if document]
        if len(splits[split]) < len(documents):
            notes[f"{split}_blank_lines"] = len(documents) - len(splits[split])
    if not splits["train"]:
        blank = notes.get("train_blank_lines", 0)
        raise UserError(f"data.corpus={spec.corpus!r}: no training document is left (blank lines: {blank})")
    if "valid" not in raw:
        splits["train"], splits["valid"] = hold_out(splits["train"], spec)
        notes["valid_held_out"] = len(splits["valid"])
    check_validation(splits["valid"], "valid" in raw, spec, f"blank lines: {notes.get('valid_blank_lines', 0)}")
    splits["train"] = evenly(splits["train"], spec.max_train_pairs)
    notes |= {f"{split}_documents": len(documents) for split, documents in splits.items()}
    return TextCorpus(**splits, name=_name(spec), notes=notes)


def build_text_tokenizer(documents: Sequence[str], spec: DataSpec) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the documents; save it with `Tokenizers(tokenizer, tokenizer).save(folder)`."""
    return train_tokenizer(documents, spec.vocab_size, lowercase=spec.lowercase)


@dataclass(frozen=True, eq=False)
class TextDataset:
    """Blocks of token ids `(N, block_size)`; `dropped_tokens` at the end did not fill a block."""

    blocks: npt.NDArray[np.int32]
    dropped_tokens: int

    @classmethod
    def encode(
        cls,
        documents: Sequence[str],
        tokenizer: PreTrainedTokenizerFast,
        block_size: int,
        name: str = "data",
    ) -> TextDataset:
        """Encode documents, each followed by eos, and pack them. Raises `UserError` if they fill no block."""
        flat = encode_texts(documents, tokenizer).flat
        count = len(flat) // block_size
        if count == 0:
            raise UserError(
                f"{name}: {len(flat)} tokens of {len(documents)} documents fill no block of block_size={block_size}"
            )
        used = count * block_size
        return cls(flat[:used].reshape(count, block_size), len(flat) - used)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """`(N,)`: tokens of each block, all the same; what `BatchPlan` takes."""
        return np.full(len(self.blocks), self.blocks.shape[1], dtype=np.int64)

    def target_tokens(self, indices: Sequence[int]) -> int:
        """Predicted tokens of these blocks: all but the first of each."""
        return len(indices) * (self.blocks.shape[1] - 1)

    def collate(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """See `collate_text`."""
        return collate_text(self, indices)


def collate_text(dataset: TextDataset, indices: Sequence[int]) -> dict[str, Tensor]:
    """`input_ids` and `labels`, `(B, block_size)`, int64.

    Labels are not shifted: the model compares its output at position t with the label at t + 1.
    No indices give one row of padding without a label, as `collate` does.
    """
    if not len(indices):
        return {"input_ids": torch.full((1, 2), PAD_ID), "labels": torch.full((1, 2), IGNORED_LABEL)}
    ids = torch.from_numpy(dataset.blocks[np.asarray(indices, dtype=np.int64)].astype(np.int64))
    return {"input_ids": ids, "labels": ids.clone()}


def _read(spec: DataSpec) -> tuple[dict[str, list[str]], dict[str, int | str]]:
    if spec.corpus == "kjv":
        return load_chapters()
    if spec.corpus == "mqar":  # its rows as words, to look at; training takes the rows with their answers
        return mqar_texts(spec.mqar or MqarSpec(), spec.block_size), {}
    if spec.hub is not None:
        return load_hub_texts(spec.hub, spec.max_train_pairs), {}
    names = {split: f"{split}_text" for split in ("train", "valid", "test")}
    paths = {split: getattr(spec, name) for split, name in names.items()}
    return {
        split: read_lines(resolve(path, f"data.{names[split]}"), f"data.{names[split]}")
        for split, path in paths.items()
        if path is not None
    }, {}


def _name(spec: DataSpec) -> str:
    if spec.hub is not None:
        return f"{spec.hub.name}/{spec.hub.config}" if spec.hub.config else spec.hub.name
    named = {"kjv": "King James text", "mqar": "multi-query associative recall"}
    return named.get(spec.corpus, str(spec.train_text))
