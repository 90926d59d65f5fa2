"""Files that a kill or a full disk leaves neither half-written nor half-deleted, and what to do about refusals.

Must never write through a link that lies where a draft goes, and never import anything heavy.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

DRAFT = ".draft-"
"""Begins the name of what is being written or deleted."""


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file in one step. Raises OSError with the file's name, which the system leaves out at times."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
        flush(draft)
        os.replace(draft, path)
        flush(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def discard(path: Path) -> None:
    """Delete a file or directory so that a kill in the middle leaves nothing that looks like it.

    Of a link only the link.
    """
    doomed = path.with_name(f"{DRAFT}{path.name}")
    delete(doomed)
    path.rename(doomed)
    delete(doomed)


def discard_drafts(folder: Path) -> None:
    """Remove what a killed process left half-written or half-deleted in `folder`."""
    for draft in folder.glob(f"{DRAFT}*"):
        delete(draft)


def delete(path: Path) -> None:
    """Delete a file, a link or a tree, or nothing."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """Bring a file or a directory's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # not every file system can flush a directory
            raise
    finally:
        os.close(handle)


def advice(error: OSError) -> str:
    """What a user can do about an error of the file system; empty where that is not known."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room on the disk"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "choose a directory that you may write to"
    return "remove the link" if error.errno == errno.ELOOP else ""


def explained(error: OSError, where: Path | str = "") -> str:
    """The file, the system's words, and what to do, in one line."""
    parts = (str(error.filename or where), error.strerror or str(error))
    said = ": ".join(part for part in parts if part)
    return f"{said}; {advice(error)}" if advice(error) else said
