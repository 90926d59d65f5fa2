"""Checkpoints on disk: written beside the final place, flushed, then renamed, so a crash never leaves half of one.

    checkpoints/step-0000400/   model.safetensors, config.json, optimizer.pt, state.json
    checkpoints/best            link to the best step's directory         checkpoints/last   link to the newest

Any directory named `step-...` is complete. `state.json` of the newest one is the authority on which step is best (the
links are for people and for tools that take a path). The best checkpoint outlives the last N without its optimizer.
This module must never delete the newest complete checkpoint, and never unpickle anything but tensors and plain values.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import UserError

STATE, OPTIMIZER = "state.json", "optimizer.pt"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the earlier ones are intact."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint directory."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """The content of state.json. Raises `UserError` when it cannot be read."""
        try:
            content = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"checkpoint {self.path}: {STATE} cannot be read ({error})") from error
        if not isinstance(content, dict):
            raise UserError(f"checkpoint {self.path}: {STATE} is not a mapping")
        return content

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state. Raises `UserError` when the file is absent or damaged."""
        try:
            return dict(torch.load(self.path / OPTIMIZER, map_location="cpu", weights_only=True))
        except Exception as error:  # torch raises many kinds for a damaged file
            raise UserError(f"checkpoint {self.path}: {OPTIMIZER} cannot be read ({error})") from error

    @property
    def resumable(self) -> bool:
        return (self.path / OPTIMIZER).is_file()


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """All complete checkpoints, oldest first."""
    found = []
    for path in (run_dir / "checkpoints").glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit() and (path / STATE).is_file():
            found.append(Checkpoint(path=path, step=int(number)))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def last_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint a run can resume from."""
    return next((found for found in reversed(list_checkpoints(run_dir)) if found.resumable), None)


def find_checkpoint(run_dir: str | Path, which: Literal["best", "last"] = "best") -> Path:
    """The directory of a run's best or newest model, to give to `from_pretrained`.

    Before the first validation "best" is the newest. Raises `UserError` when the run has no checkpoint.
    """
    checkpoints = list_checkpoints(Path(run_dir))
    if not checkpoints:
        raise UserError(f"run directory {str(run_dir)!r}: no checkpoint in {Path(run_dir) / 'checkpoints'}")
    newest = checkpoints[-1]
    best = newest.state().get("best") if which == "best" else None
    step = best["step"] if best else newest.step
    return next((found.path for found in checkpoints if found.step == step), newest.path)


def write_checkpoint(
    run_dir: Path,
    step: int,
    *,
    save_model: Callable[[Path], None],
    optimizer_state: dict[str, Any],
    state: dict[str, Any],
    keep_last: int,
) -> Path:
    """Write checkpoint `step` atomically, then prune to the newest `keep_last` and the best.

    Raises `CheckpointError` when it cannot be written (a full disk); nothing that existed before is touched then.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step-{step:07d}"
    draft = folder / f".draft-{step:07d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        discard_drafts(run_dir)
        draft.mkdir()
        save_model(draft)
        torch.save(optimizer_state, draft / OPTIMIZER)
        (draft / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        mode = (draft / STATE).stat().st_mode  # safetensors keeps its files from everybody else
        for file in draft.iterdir():
            file.chmod(mode)
            _flush(file)
        _flush(draft)
        if final.exists():  # left by a longer run that was resumed from an earlier step
            shutil.rmtree(final)
        draft.rename(final)
        _flush(folder)
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)
        kept = last_checkpoint(run_dir)
        intact = f"the checkpoint of step {kept.step} is intact" if kept else "there is no earlier checkpoint"
        raise CheckpointError(
            f"step {step}: the checkpoint could not be written to {folder}: {_reason(error)}; {intact}"
        ) from error
    best = state.get("best")
    _link(folder / "last", final.name)
    if best:
        _link(folder / "best", f"step-{best['step']:07d}")
    _prune(run_dir, keep_last=keep_last, best_step=best["step"] if best else None)
    return final


def discard_after(run_dir: Path, step: int) -> None:
    """Remove checkpoints newer than `step` (a resumed run will write its own)."""
    for checkpoint in list_checkpoints(run_dir):
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)


def discard_drafts(run_dir: Path) -> None:
    """Remove what a killed process left half-written."""
    for draft in (run_dir / "checkpoints").glob(".draft-*"):
        shutil.rmtree(draft, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small text file in one step."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    _flush(draft)
    os.replace(draft, path)
    _flush(path.parent)


def _prune(run_dir: Path, *, keep_last: int, best_step: int | None) -> None:
    for checkpoint in list_checkpoints(run_dir)[:-keep_last]:
        if checkpoint.step == best_step:
            (checkpoint.path / OPTIMIZER).unlink(missing_ok=True)
        else:
            # renamed first, so that a kill in the middle does not leave a directory that looks complete
            doomed = checkpoint.path.with_name(f".draft-{checkpoint.path.name}")
            checkpoint.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _link(link: Path, target: str) -> None:
    draft = link.with_name(f".{link.name}.link")
    try:
        draft.unlink(missing_ok=True)
        draft.symlink_to(target)
        os.replace(draft, link)
    except OSError:  # a file system without links: `find_checkpoint` does not need them
        draft.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # not every file system can flush a directory
            raise
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    """The system's own words where there are any ("No space left on device")."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:300] or type(error).__name__
