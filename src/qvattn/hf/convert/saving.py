"""A converted model as a checkpoint directory that appears whole or not at all.

Written into a draft beside the target and renamed once everything is on the disk, so a kill leaves a draft and nothing
else. An existing target that holds anything is refused unless it is to be replaced.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...files import DRAFT, delete, explained, flush, write_atomically
from ...models import CausalLM

REPORT = "conversion.json"


def check_out(out: Path, overwrite: bool) -> None:
    """Raises UserError where nothing can be written, before anything is computed."""
    _put_back(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; give a directory")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"--out {out}: is not empty; choose another directory, or --overwrite")
    if overwrite and out.is_dir() and any(out.iterdir()) and not (out / REPORT).is_file():
        raise UserError(f"--out {out}: --overwrite replaces earlier conversions only, and there is no {REPORT} in it")
    parent = out.resolve().parent
    place = next(folder for folder in (parent, *parent.parents) if folder.exists())
    if not os.access(place, os.W_OK):
        raise UserError(f"--out {out}: {place} cannot be written to")


def _old(out: Path) -> Path:
    """Where an earlier conversion stands while it is replaced."""
    return out.with_name(f"{DRAFT}{out.name}.old")


def _put_back(out: Path) -> None:
    """Undo a replacement that a kill cut in two."""
    out = out.resolve()
    if not out.exists() and _old(out).is_dir():
        _old(out).rename(out)


def save(model: CausalLM, report: dict[str, Any], out: Path) -> None:
    """Write weights, config, tokenizer, generation settings, card and report; then rename."""
    out = out.resolve()
    draft, old = out.with_name(f"{DRAFT}{out.name}"), _old(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        delete(draft)
        draft.mkdir()
        model.save_pretrained(draft)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(draft)
        write_atomically(draft / REPORT, json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        for file in draft.rglob("*"):
            if file.is_file():
                flush(file)
        flush(draft)
        delete(old)
        if out.is_dir():
            out.rename(old)
        draft.rename(out)
        flush(out.parent)
        delete(old)
    except OSError as error:
        raise UserError(explained(error, out)) from error
