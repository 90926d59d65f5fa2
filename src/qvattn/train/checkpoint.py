"""Checkpoints on disk: written beside the final place, flushed, then renamed, so a crash never leaves half of one.

    checkpoints/step-0000400/   model.safetensors, config.json, optimizer.pt, state.json, SHA256SUMS
                                (sharded: model/ and optimizer/, a file a process; `export_model` adds the first)
    checkpoints/best            link to the best step's directory         checkpoints/last   link to the newest

Any directory named `step-...` is complete; SHA256SUMS (as `sha256sum -c` reads it) tells whether it is still what was
written. `state.json` of the newest one is the authority on which step is best (the links are for people and for tools
that take a path). A best checkpoint outlives the last N without its optimizer, as long as one of these names it.
This module must never delete the newest complete checkpoint, and never unpickle anything but tensors and plain values.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import UserError
from ..files import DRAFT, advice, delete, discard, discard_drafts, flush, write_atomically
from ..untrusted import parse_json

STATE, OPTIMIZER, SUMS = "state.json", "optimizer.pt", "SHA256SUMS"
WEIGHTS = "model.safetensors"
MODEL_SHARDS, OPTIMIZER_SHARDS = "model", "optimizer"
"""Directories of a checkpoint that several processes wrote together."""


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
            content = parse_json((self.path / STATE).read_text(encoding="utf-8"))
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
        return (self.path / OPTIMIZER).is_file() or (self.path / OPTIMIZER_SHARDS).is_dir()

    @property
    def sharded(self) -> bool:
        """Whether its weights lie in shards (an exported one has them in one file too)."""
        return (self.path / MODEL_SHARDS).is_dir()

    @property
    def exported(self) -> bool:
        """Whether `from_pretrained` can read it."""
        return not self.sharded or (self.path / WEIGHTS).is_file()

    def damage(self, *, resume: bool) -> str | None:
        """What is wrong with the files, or None when they are those that were written (their sums are read again).

        resume: whether the optimizer's state is needed too. A checkpoint without sums, of an earlier version, is taken
        for whole.
        """
        try:
            listed = (self.path / SUMS).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"{SUMS} cannot be read ({error})"
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in listed.splitlines())}
        if STATE not in sums or not any(map(_of_optimizer, sums)) or len(sums) < 3:
            return f"{SUMS} is not whole"
        for name, expected in sums.items():
            if _of_optimizer(name) and not resume:
                continue
            file = self.path / name
            if ".." in file.parts or not file.is_relative_to(self.path) or not file.is_file():
                return f"{name} is missing"
            if digest(file) != expected:
                return f"{name} is not what was written (its SHA-256 differs)"
        return None


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


def whole_checkpoint(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that a run can resume from and whose files are whole, and what is wrong with newer ones.

    None when the run has no checkpoint yet. Raises `UserError` when it has some and none is whole.
    """
    damaged: list[str] = []
    for found in reversed(list_checkpoints(run_dir)):
        if not found.resumable:
            continue
        wrong = found.damage(resume=True)
        if wrong is None:
            return found, damaged
        damaged.append(f"checkpoint {found.path}: {wrong}")
    if damaged:
        raise UserError(
            f"cannot resume {str(run_dir)!r}: no checkpoint is whole. {'; '.join(damaged)}. "
            "Put back a copy, or start anew with --overwrite"
        )
    return None, damaged


def find_checkpoint(run_dir: str | Path, which: Literal["best", "last"] = "best") -> Path:
    """The directory of a run's best or newest model, to give to `from_pretrained`; its files are verified.

    Before the first validation "best" is the newest. Raises `UserError` when the run has no checkpoint, or the one that
    is asked for is gone, damaged or in shards: another one is never given in its place.
    """
    chosen = choose_checkpoint(run_dir, which)
    if not chosen.exported:
        raise UserError(
            f"checkpoint {chosen.path} lies in shards, one for each process that trained it; "
            f"`qvattn export {run_dir} --which {which}` puts them together"
        )
    return chosen.path


def choose_checkpoint(run_dir: str | Path, which: Literal["best", "last"] = "best") -> Checkpoint:
    """As `find_checkpoint`, in shards or not."""
    checkpoints = list_checkpoints(Path(run_dir))
    if not checkpoints:
        raise UserError(f"run directory {str(run_dir)!r}: no checkpoint in {Path(run_dir) / 'checkpoints'}")
    newest = checkpoints[-1]
    best = newest.state().get("best") if which == "best" else None
    step = best["step"] if best else newest.step
    chosen = next((found for found in checkpoints if found.step == step), None)
    if chosen is None:
        raise UserError(f"run directory {str(run_dir)!r}: the best checkpoint, of step {step}, is gone")
    for checkpoint in (newest, chosen):
        if wrong := checkpoint.damage(resume=False):
            raise UserError(
                f"checkpoint {checkpoint.path}: {wrong}; give the path of another checkpoint, or train again"
            )
    return chosen


def write_checkpoint(
    run_dir: Path,
    step: int,
    *,
    save_model: Callable[[Path], Mapping[str, str] | None],
    optimizer_state: dict[str, Any] | None,
    state: dict[str, Any],
    keep_last: int,
) -> Path:
    """Write checkpoint `step` atomically, then prune to the newest `keep_last` and the best.

    save_model: writes the model into a directory; of a sharded one the optimizer's state too, which is None then, and
        returns the SHA-256 sums that other processes have taken of their files.

    Raises `CheckpointError` when it cannot be written (a full disk); nothing that existed before is touched then.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step-{step:07d}"
    draft = draft_folder(run_dir, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        discard_drafts(folder)
        draft.mkdir()
        known = save_model(draft) or {}
        if optimizer_state is not None:
            with (draft / OPTIMIZER).open("wb") as file:  # torch itself does not say that the disk is full
                torch.save(optimizer_state, file)
        (draft / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        _write_sums(draft, known)
        mode = (draft / STATE).stat().st_mode  # safetensors keeps its files from everybody else
        for path in (*draft.rglob("*"), draft):
            if path.is_file():
                path.chmod(mode)
            flush(path)
        if final.exists():  # left by a longer run that was resumed from an earlier step
            discard(final)
        draft.rename(final)
        flush(folder)
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)
        kept = last_checkpoint(run_dir)
        intact = f"the checkpoint of step {kept.step} is intact" if kept else "there is no earlier checkpoint"
        raise CheckpointError(
            f"step {step}: the checkpoint could not be written to {folder}: {_reason(error)}; "
            f"{intact}{_what_to_do(error)}"
        ) from error
    best = state.get("best")
    _link(folder / "last", final.name)
    if best:
        _link(folder / "best", f"step-{best['step']:07d}")
    _prune(run_dir, keep_last=keep_last)
    return final


def draft_folder(run_dir: Path, step: int) -> Path:
    """Where checkpoint `step` is while it is written."""
    return run_dir / "checkpoints" / f"{DRAFT}{step:07d}"


def add_file(checkpoint: Checkpoint, name: str, write: Callable[[Path], None]) -> Path:
    """Add a file to a complete checkpoint in one step, and to its sums; `write` is given a draft's path."""
    final, draft = checkpoint.path / name, checkpoint.path / f"{DRAFT}{name}"
    delete(draft)
    write(draft)
    draft.chmod((checkpoint.path / STATE).stat().st_mode)
    flush(draft)
    os.replace(draft, final)
    sums = (checkpoint.path / SUMS).read_text(encoding="utf-8").splitlines()
    kept = [line for line in sums if line.partition("  ")[2] != name]
    write_atomically(checkpoint.path / SUMS, "\n".join([*kept, f"{digest(final)}  {name}"]) + "\n")
    return final


def discard_after(run_dir: Path, step: int) -> None:
    """Remove checkpoints newer than `step` (a resumed run will write its own)."""
    for checkpoint in list_checkpoints(run_dir):
        if checkpoint.step > step:
            discard(checkpoint.path)


def _prune(run_dir: Path, *, keep_last: int) -> None:
    """Keep the newest, and the best models that these name: a run may have to go back to any of them."""
    checkpoints = list_checkpoints(run_dir)
    best = {_best_step(checkpoint) for checkpoint in checkpoints[-keep_last:]}
    for checkpoint in checkpoints[:-keep_last]:
        if checkpoint.step in best:
            for name in (OPTIMIZER, OPTIMIZER_SHARDS):
                if (checkpoint.path / name).exists():
                    discard(checkpoint.path / name)
        else:
            discard(checkpoint.path)


def _best_step(checkpoint: Checkpoint) -> int | None:
    try:
        best = checkpoint.state().get("best")
    except UserError:  # damaged: it will not be gone back to
        return None
    return best["step"] if best else None


def _link(link: Path, target: str) -> None:
    draft = link.with_name(f".{link.name}.link")
    try:
        draft.unlink(missing_ok=True)
        draft.symlink_to(target)
        os.replace(draft, link)
    except OSError:  # a file system without links: `find_checkpoint` does not need them
        draft.unlink(missing_ok=True)


def digest(file: Path) -> str:
    """The SHA-256 sum of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _of_optimizer(name: str) -> bool:
    return name == OPTIMIZER or name.startswith(f"{OPTIMIZER_SHARDS}/")


def _write_sums(folder: Path, known: Mapping[str, str]) -> None:
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    lines = [f"{known.get(name) or digest(folder / name)}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _refusal(error: BaseException) -> OSError | None:
    """The system's refusal behind an error of a library."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _what_to_do(error: BaseException) -> str:
    refusal = _refusal(error)
    return f"; {advice(refusal)}, then go on with --resume" if refusal and advice(refusal) else ""


def _reason(error: BaseException) -> str:
    """The system's own words where there are any ("No space left on device")."""
    refusal = _refusal(error)
    if refusal is not None:
        return str(refusal.strerror)
    return " ".join(str(error).split())[:300] or type(error).__name__
