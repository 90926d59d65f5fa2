"""Translation of lines of text: encode, batch by length, search, decode, in the order the lines came in.

An empty line gives an empty line. A line is never cut silently: one that is too long is refused, by number, or cut and
counted where the caller says so. Tokenizers are whatever encodes a list of texts to ids and decodes ids (this module
knows nothing of corpora and runs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import UserError
from ..models import QvattnModel
from .beam import EarlyStopping, beam_search
from .many import greedy_many
from .session import LeanModel, as_lean, padded


class TextTokenizer(Protocol):
    """What is used of a tokenizer: encoding ends in end-of-sentence."""

    def __call__(self, text: list[str]) -> Any: ...

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]: ...


class TokenizerPair(Protocol):
    """A source and a target tokenizer (may be one)."""

    @property
    def source(self) -> Any: ...

    @property
    def target(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Search:
    """How translations are looked for.

    beam: 1 is greedy.  length_penalty, early_stopping: see `beam_search`.  max_new_tokens: of one translation, its end
    included.  rows: source lines in a batch.
    """

    beam: int = 5
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    max_new_tokens: int = 256
    rows: int = 64

    def __post_init__(self) -> None:
        for field in ("beam", "max_new_tokens", "rows"):
            if getattr(self, field) < 1:
                raise UserError(f"{field}={getattr(self, field)}: allowed is 1 or more")


@dataclass(frozen=True, kw_only=True)
class Translations:
    """texts: one per line.  The counts of what was read and made; `unfinished` ones met max_new_tokens."""

    texts: list[str]
    empty: int
    truncated: int
    unfinished: int
    source_tokens: int
    target_tokens: int


@torch.inference_mode()
def translate_lines(
    model: QvattnModel | LeanModel,
    tokenizers: TokenizerPair,
    lines: Sequence[str],
    search: Search | None = None,
    *,
    max_source_tokens: int | None = None,
    truncate: bool = False,
    on_lines: Callable[[int], None] | None = None,
) -> Translations:
    """Translate every line.

    max_source_tokens: of one line, end-of-sentence included; a longer one raises UserError naming its number, or with
    `truncate` is cut to so many (its end-of-sentence kept).  on_lines: told how many lines each batch finished.
    """
    search = search or Search()
    lean_model = as_lean(model)
    encoded = [list(ids) for ids in tokenizers.source(list(lines))["input_ids"]] if lines else []
    wanted = [i for i, line in enumerate(lines) if line.strip() and len(encoded[i]) > 1]
    truncated = _limit(encoded, wanted, max_source_tokens, truncate)
    made = translate_ids(lean_model, [encoded[i] for i in wanted], search, on_done=on_lines)
    found = dict(zip(wanted, made, strict=True))
    ends = set(lean_model.eos)
    words = [[t for t in found.get(i, ()) if t not in ends] for i in range(len(lines))]
    texts = tokenizers.target.batch_decode(words, skip_special_tokens=True) if lines else []
    return Translations(
        texts=[" ".join(text.split("\n")) if words[i] else "" for i, text in enumerate(texts)],
        empty=len(lines) - len(wanted),
        truncated=truncated,
        unfinished=sum(1 for ids in found.values() if not ids or ids[-1] not in ends),
        source_tokens=sum(len(encoded[i]) for i in wanted),
        target_tokens=sum(map(len, found.values())),
    )


def translate_ids(
    lean_model: LeanModel,
    sources: Sequence[Sequence[int]],
    search: Search,
    *,
    on_done: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """The best translation of each source as ids, its end-of-sentence included (if it came to one)."""
    if search.beam == 1:
        return greedy_many(lean_model, sources, rows=search.rows, max_new_tokens=search.max_new_tokens, on_done=on_done)
    found: list[list[int]] = [[] for _ in sources]
    for batch in batches_by_length([len(source) for source in sources], search.rows):
        made = beam_search(
            lean_model,
            *padded([sources[i] for i in batch], lean_model.pad),
            beam=search.beam,
            length_penalty=search.length_penalty,
            early_stopping=search.early_stopping,
            max_new_tokens=search.max_new_tokens,
        )
        for i, row in zip(batch, made.sequences[:, 0, 1:].tolist(), strict=True):
            found[i] = _until_end(row, lean_model)
        if on_done is not None:
            on_done(len(batch))
    return found


def _until_end(row: list[int], lean_model: LeanModel) -> list[int]:
    for i, token in enumerate(row):
        if token in lean_model.eos:
            return row[: i + 1]
        if token == lean_model.pad:
            return row[:i]
    return row


def batches_by_length(lengths: Sequence[int], rows: int) -> Iterator[list[int]]:
    """Indices in batches of `rows`, longest first, so that memory is asked for once and batches hold little padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for start in range(0, len(order), rows):
        yield order[start : start + rows]


def _limit(encoded: list[list[int]], wanted: Sequence[int], limit: int | None, truncate: bool) -> int:
    """Cut over-long lines in place and count them, or refuse them."""
    if limit is None:
        return 0
    if limit < 2:
        raise UserError(f"max_source_tokens={limit}: allowed is 2 (a token and end-of-sentence) or more")
    long = [i for i in wanted if len(encoded[i]) > limit]
    if long and not truncate:
        more = f" (and {len(long) - 1} more)" if len(long) > 1 else ""
        raise UserError(
            f"line {long[0] + 1} has {len(encoded[long[0]])} tokens, allowed are {limit}{more}: "
            "shorten it, or have it truncated"
        )
    for i in long:
        encoded[i] = [*encoded[i][: limit - 1], encoded[i][-1]]
    return len(long)
