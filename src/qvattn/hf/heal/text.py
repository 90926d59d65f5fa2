"""Plain text as windows of token ids: read, tokenised once as it stands, and cut without overlap.

What is held out never reaches training; which windows those are depends on the files and the sizes alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...data import TextDataset
from ...data.lines import read_lines, resolve
from ...errors import UserError

HELD_OUT = 16
"""Of the windows of each training text one in so many, at its end, is held out where no validation text is given."""

Windows = npt.NDArray[np.int32]
"""(N, context) token ids."""


def read_ids(path: str, field: str, tokenizer: Any) -> npt.NDArray[np.int32]:
    """The ids of a UTF-8 text file (`.gz` too), without special tokens. Errors name the file and the field."""
    lines = read_lines(resolve(path, field), field)
    ids = tokenizer("\n".join(lines) + "\n", add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int32)


def cut(ids: npt.NDArray[np.int32], context: int, path: str, field: str, *, at_least: int = 1) -> Windows:
    """(N, context). Raises UserError when the text does not fill `at_least` windows."""
    count = len(ids) // context
    if count < at_least:
        raise UserError(
            f"{field}: {path} holds {len(ids)} tokens; at least {at_least * context} are needed "
            f"({at_least} window(s) of {context})"
        )
    return ids[: count * context].reshape(count, context)


def training_windows(
    texts: Sequence[str], valid: str | None, tokenizer: Any, *, context: int, valid_tokens: int
) -> tuple[TextDataset, Windows]:
    """What is trained on, and at most `valid_tokens` for the curve: of `valid`, or of the end of every text."""
    train, held_out = [], []
    for path in texts:
        windows = cut(read_ids(path, "text", tokenizer), context, path, "text", at_least=1 if valid else 2)
        if valid is None:
            kept = max(1, len(windows) // HELD_OUT)
            held_out.append(windows[-kept:])
            windows = windows[:-kept]
        train.append(windows)
    if valid is not None:
        held_out.append(cut(read_ids(valid, "valid", tokenizer), context, valid, "valid"))
    data = TextDataset(np.concatenate(train), 0)
    return data, np.concatenate(held_out)[: max(1, valid_tokens // context)]


def as_batches(windows: Windows, rows: int) -> list[dict[str, torch.Tensor]]:
    """Batches of at most `rows` windows, in order: input_ids and (unshifted) labels."""
    data = TextDataset(windows, 0)
    return [data.collate(range(i, min(i + rows, len(windows)))) for i in range(0, len(windows), rows)]


def fingerprint(windows: Windows) -> str:
    """Equal for equal windows."""
    digest = hashlib.sha256(repr(windows.shape).encode())
    digest.update(np.ascontiguousarray(windows).tobytes())
    return digest.hexdigest()[:16]


def name_of(path: str) -> str:
    """A text as results and cards name it: without the folders of one machine."""
    return Path(path).name
