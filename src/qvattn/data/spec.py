"""What to train on, as one validated object.

`DataSpec` says where a corpus comes from and how it is cut into tokens and batches. It never opens a file:
paths are looked at when the corpus is loaded, so a recipe can be checked on a machine without the data.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .synthetic import ControlledSpec, MqarSpec

ParallelKind = Literal["verses", "files", "tsv", "hub", "controlled"]
TextKind = Literal["text", "hub-text", "kjv", "mqar"]

_FILES = ("train_source", "train_target", "valid_source", "valid_target", "test_source", "test_target")
_TSV = ("train_tsv", "valid_tsv", "test_tsv", "tsv_columns")
_TEXT = ("train_text", "valid_text", "test_text")
_PLACES: dict[str, tuple[str, ...]] = {
    "verses": (),
    "files": _FILES,
    "tsv": _TSV,
    "hub": ("hub",),
    "controlled": ("controlled",),
    "text": _TEXT,
    "hub-text": ("hub",),
    "kjv": (),
    "mqar": ("mqar",),
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "files": ("train_source", "train_target"),
    "tsv": ("train_tsv",),
    "hub": ("hub",),
    "text": ("train_text",),
    "hub-text": ("hub",),
}


class HubSpec(BaseModel):
    """A corpus read through `datasets.load_dataset`.

    `name` is a hub id (`wmt/wmt17`, `bentrevett/multi30k`) or a local folder that `load_dataset` understands;
    `config` its configuration (`de-en`). Rows carry either a `translation` dict by language or one column per
    language; for text corpora `text_column` is read. With `streaming` only the first `max_train_pairs` rows
    of the training split are fetched. A validation or test split may be missing unless it is named; null: unused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    config: str | None = None
    source_language: str = "en"
    target_language: str = "de"
    text_column: str = "text"
    train_split: str = "train"
    valid_split: str | None = "validation"
    test_split: str | None = "test"
    streaming: bool = False


class DataSpec(BaseModel):
    """A corpus, its tokenizer and its batches.

    corpus: `verses` (King James to World English, needs the `demo` extra), `files` (two aligned files a
        split), `tsv` (one file a split), `hub`, `controlled` (a made language whose grammar is known); for causal
        language models `text` (files), `hub-text`, `kjv`, `mqar` (associative recall).
    controlled, mqar: how those two are made; unset: their defaults. Their tokenizer has one entry a word, whatever
        vocab_size says, and a row of `mqar` is block_size long.
    paths: plain or `.gz`, UTF-8; `$NAME` and `~` are expanded; relative ones start at the current directory.
    valid_fraction: share of the training pairs held out for validation where no validation data is given,
        evenly spaced over the corpus, so that no random state decides it.
    vocab_size: entries of the (or of each) tokenizer, the four special ones and the 256 bytes included.
    max_length: tokens of one side, end-of-sentence included; longer pairs are dropped and counted.
    max_tokens: bounds max(padded source tokens, padded target tokens) of a batch.
    max_train_pairs: at most so many training pairs (or documents), evenly spaced; the first if streaming.
    block_size: tokens in a row of a causal language model's batch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: ParallelKind | TextKind = "verses"

    train_source: str | None = None
    train_target: str | None = None
    valid_source: str | None = None
    valid_target: str | None = None
    test_source: str | None = None
    test_target: str | None = None

    train_tsv: str | None = None
    valid_tsv: str | None = None
    test_tsv: str | None = None
    tsv_columns: tuple[int, int] | None = None

    train_text: str | None = None
    valid_text: str | None = None
    test_text: str | None = None

    hub: HubSpec | None = None
    controlled: ControlledSpec | None = None
    mqar: MqarSpec | None = None

    valid_fraction: float | None = Field(default=None, gt=0.0, lt=0.5)
    vocab_size: int = Field(default=8000, ge=264)
    shared_vocab: bool = True
    max_length: int = Field(default=128, ge=2)
    lowercase: bool = False
    max_tokens: int = Field(default=2000, ge=2)
    max_train_pairs: int | None = Field(default=None, ge=1)
    block_size: int = Field(default=256, ge=2)

    @property
    def is_text(self) -> bool:
        """True for corpora of a causal language model, False for sentence pairs."""
        return self.corpus in ("text", "hub-text", "kjv", "mqar")

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        allowed = _PLACES[self.corpus]
        for field in (*_FILES, *_TSV, *_TEXT, "hub", "controlled", "mqar"):
            if getattr(self, field) is not None and field not in allowed:
                takes = ", ".join(allowed) or "no paths"
                raise ValueError(f"{field} is set, but corpus={self.corpus!r} does not read it; it takes {takes}")
        for field in _REQUIRED.get(self.corpus, ()):
            if getattr(self, field) is None:
                raise ValueError(f"corpus={self.corpus!r} needs {field}")
        self._check_made()
        for split in ("valid", "test"):
            source, target = f"{split}_source", f"{split}_target"
            if (getattr(self, source) is None) != (getattr(self, target) is None):
                raise ValueError(f"{source} and {target} go together: give both or neither")
        if self.valid_fraction is not None and (self.corpus in ("verses", "kjv")):
            raise ValueError(f"valid_fraction is set, but corpus={self.corpus!r} holds out whole books")
        if self.valid_fraction is not None and (self.valid_source or self.valid_tsv or self.valid_text):
            raise ValueError("valid_fraction is set, but validation files are given too: drop one of them")
        if self.tsv_columns is not None and (min(self.tsv_columns) < 0 or len(set(self.tsv_columns)) != 2):
            raise ValueError(f"tsv_columns={self.tsv_columns}: two different columns, counted from 0, are needed")
        return self

    def _check_made(self) -> None:
        if self.corpus not in ("controlled", "mqar"):
            return
        for field in ("valid_fraction", "max_train_pairs"):
            if getattr(self, field) is not None:
                raise ValueError(
                    f"{field} is set, but corpus={self.corpus!r} says its sizes itself: {self.corpus}.train"
                )
        shortest = (self.mqar or MqarSpec()).shortest_row
        if self.corpus == "mqar" and self.block_size < shortest:
            raise ValueError(f"block_size={self.block_size}: the pairs and questions of mqar need {shortest} tokens")
