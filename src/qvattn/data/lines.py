"""Reading text files line by line.

The one place where bytes become text. A line ends at a line feed and nowhere else: U+2028, form feeds and
their kin stay inside their line, because aligned files lose their alignment otherwise. It must never repair
bad bytes silently; whatever is wrong is named with file and line.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from ..errors import UserError

_BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 2**24
"""Bytes. A line is a sentence or a document; what is longer is another kind of file."""
MOST_EXPANSION, UNSUSPICIOUS = 50, 2**25
"""How many times its size a compressed file may become, once it is this large: text becomes three to ten times."""


def resolve(path: str, field: str) -> Path:
    """Expand `$NAME` and `~` in `path`; an unset variable is an error that names it and the field."""
    expanded = os.path.expanduser(os.path.expandvars(path))
    unset = re.search(r"\$(\w+|\{[^}]*\})", expanded)
    if unset:
        raise UserError(f"{field}={path!r}: the environment variable {unset[1].strip('{}')} is not set")
    return Path(expanded)


def read_lines(path: Path, field: str = "path") -> list[str]:
    """All lines of a UTF-8 file (`.gz`: decompressed), without line ends and byte order mark.

    Errors: missing or unreadable file, broken gzip, bytes that are not UTF-8 (with the line number), no line.
    """
    try:
        with _open(path) as handle:
            lines = list(_decode(handle, path))
    except FileNotFoundError:
        raise UserError(f"{field}: {path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{field}: {path} is a folder, a text file is needed") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{field}: {path} is not a whole gzip file ({error})") from None
    except OSError as error:
        raise UserError(f"{field}: {path} cannot be read ({error.strerror or error})") from None
    if not lines:
        raise UserError(f"{field}: {path} is empty")
    return lines


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _bounded(handle: IO[bytes], path: Path) -> Iterator[bytes]:
    """The lines, as long as they are those of a text and the file does not swell from next to nothing."""
    total, number = 0, 0
    limit = max(UNSUSPICIOUS, MOST_EXPANSION * path.stat().st_size)
    while raw := handle.readline(LONGEST_LINE + 1):
        number += 1
        total += len(raw)
        if len(raw) > LONGEST_LINE:
            raise UserError(f"{path}, line {number}: longer than {LONGEST_LINE:,} bytes; is it a text file?")
        if path.suffix == ".gz" and total > limit:
            raise UserError(f"{path} holds more than {MOST_EXPANSION} times its size; decompress it if that is meant")
        yield raw


def _decode(handle: IO[bytes], path: Path) -> Iterator[str]:
    for number, raw in enumerate(_bounded(handle, path), start=1):
        if number == 1:
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise UserError(f"{path} is UTF-16: convert it to UTF-8")
            if raw.startswith(b"\x1f\x8b"):
                raise UserError(f"{path} is compressed: its name must end in .gz")
            raw = raw.removeprefix(_BOM)
        try:
            yield raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            bad = raw[error.start]
            raise UserError(
                f"{path}, line {number}: not UTF-8 (byte 0x{bad:02x} at byte {error.start + 1} of the line)"
            ) from None
