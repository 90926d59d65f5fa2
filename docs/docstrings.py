"""Shows docstrings as they are meant (griffe extension): lines `name: what it is` become a list of names."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMED = re.compile(r"^((?:[A-Za-z_]\w*)(?:(?:, | and |/)[A-Za-z_]\w*)*)((?: \([^)]*\))?): (?=\S)")


def with_lists(text: str) -> str:
    """`text` with a bulleted list in place of each run of lines that start with `name: ` or `name, name (shape): `.

    A line that follows without a blank one between continues its entry. Sections (`Args:`) and code are left alone.
    """
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        match = NAMED.match(line)
        if match and not match[1].lower().startswith(("example", "raises", "returns", "note", "source", "errors")):
            if not in_list and lines and lines[-1].strip():
                lines.append("")
            names = ", ".join(f"`{name}`" for name in re.split(r", | and |/", match[1]))
            lines.append(f"- {names}{match[2]}: {line[match.end() :]}")
            in_list = True
        elif in_list and line.strip():
            lines.append(f"  {line.strip()}")
        else:
            in_list = False
            lines.append(line)
    return "\n".join(lines)


class Lists(griffe.Extension):
    """Applies `with_lists` to every docstring that is shown."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each object it collects."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
