"""Continuing a text with a language model, the text shown as it grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..models import QvattnModel
from .greedy import decode_rows
from .sample import chooser
from .session import LeanModel, as_lean

UNFINISHED = "\ufffd"
"""What a tokenizer shows for bytes that do not make a character yet."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """text: prompt and continuation.  continuation: what was added.  ended: by end-of-text, not by the limit."""

    text: str
    continuation: str
    prompt_tokens: int
    new_tokens: int
    ended: bool
    seconds: float
    tokens_per_second: float
    cache_bytes: int


@torch.inference_mode()
def continue_text(
    model: QvattnModel | LeanModel,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    before: Sequence[int] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Continuation:
    """Continue `prompt`, which stands at the beginning of a document.

    before: ids in front of it; default, end-of-text, as in our training.
    on_text: gets the prompt and then each further piece of text as soon as its characters are whole.
    """
    lean_model = as_lean(model)
    if lean_model.is_translation or not lean_model.eos:
        raise UserError("continuing a text needs a language model with an end-of-text token")
    end = lean_model.eos[0]
    front = [end] if before is None else list(before)
    head = [*front, *(t for t in tokenizer(prompt)["input_ids"] if t not in lean_model.eos)]
    if not head:
        raise UserError("the prompt is empty, and this model's texts begin with no token of their own: give some text")
    choose = chooser(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    growing = _Growing(tokenizer, head[len(front) :], on_text)
    session = lean_model.open(torch.tensor([head]))
    begun = time.perf_counter()
    new = decode_rows(session, choose, max_new_tokens=max_new_tokens, eos=lean_model.eos, on_tokens=growing.add)[
        0
    ].tolist()
    seconds = time.perf_counter() - begun
    ended = new[-1] in lean_model.eos
    text = growing.finish()
    return Continuation(
        text=text,
        continuation=text[len(growing.prompt) :],
        prompt_tokens=len(head),
        new_tokens=len(new),
        ended=ended,
        seconds=seconds,
        tokens_per_second=len(new) / seconds,
        cache_bytes=session.cache.nbytes,
    )


class _Growing:
    """Text that grows by tokens; hands on only whole characters."""

    def __init__(self, tokenizer: Any, prompt: list[int], on_text: Callable[[str], None] | None) -> None:
        self._tokenizer, self._ids, self._on_text, self._shown = tokenizer, list(prompt), on_text, 0
        self.prompt = self._text()
        self._show(self.prompt)

    def add(self, tokens: Tensor) -> None:
        self._ids.append(int(tokens[0]))
        if self._on_text is not None:
            text = self._text()
            self._show(text.rstrip(UNFINISHED))

    def finish(self) -> str:
        text = self._text()
        self._show(text)
        return text

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text

    def _show(self, text: str) -> None:
        if self._on_text is not None and len(text) > self._shown:
            self._on_text(text[self._shown :])
            self._shown = len(text)
