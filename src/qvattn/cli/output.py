"""What the commands share: JSON on stdout, everything meant for people on stderr.

Must never hold logic of a command, nor import anything heavy.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console


def stderr_console() -> Console:
    """The console for progress and messages."""
    return Console(stderr=True, highlight=False)


def stdout_console() -> Console:
    """The console for results somebody asked for; wide where no terminal sets a width."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def say(message: str) -> None:
    """One plain line (or a few) on stderr; no markup is interpreted."""
    print(message, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print `value` as strict JSON on stdout: NaN and infinity become null, pydantic models their fields."""
    print(json.dumps(to_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def to_plain(value: Any) -> Any:
    """`value` in JSON's types. Whatever has no counterpart there (paths, enums' members) becomes its text."""
    if hasattr(value, "model_dump"):
        return to_plain(value.model_dump(mode="python"))
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def check_page(output: Path, example: str) -> None:
    """Refuse a page whose numbers, in a JSON file beside it, would take its place. Raises UserError."""
    from qvattn.errors import UserError

    if output.is_dir() or output.suffix == ".json":
        raise UserError(f"--output {output}: give an HTML file, such as {example}")


def hand_over(found: Any, output: Path, *, as_json: bool, show: Callable[[], None]) -> None:
    """The numbers of an analysis: into the JSON file beside its page, and to stdout as JSON or as `show` does it."""
    from qvattn.train.run import write_json

    numbers = output.with_suffix(".json")
    write_json(numbers, found)
    say(f"page: {output}, numbers: {numbers}")
    if as_json:
        print_json(found)
    else:
        show()
