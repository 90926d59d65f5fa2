"""Hostile values, and ways to change a valid file in a place or two."""

from __future__ import annotations

import copy
import random
from typing import Any

from hypothesis import strategies as st

ODD = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", " ", "x" * 5000, "../../etc/passwd", "\x00", "\ud800", "名前", "1e9",
    "none", "auto", "nan", [], [[]], [None], [1, "a"], {}, {"": {}}, {"a": {"b": [1]}}, [0] * 300,
]  # fmt: skip
"""Values where something else is expected."""

seeds = st.integers(0, 2**32)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a tree of mappings and lists."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(found for key, value in inner for found in places(value, (*path, key)))]


def changed(tree: Any, draw: random.Random, odd: list[Any] = ODD) -> Any:
    """A copy with one to three values replaced, moved, removed or renamed."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.randint(1, 3)):
        path = draw.choice(places(tree)[1:] or [()])
        if not path:
            return draw.choice(odd)
        holder = tree
        for key in path[:-1]:
            holder = holder[key]
        kind = draw.random()
        if kind < 0.7:
            holder[path[-1]] = draw.choice(odd)
        elif kind < 0.8 and isinstance(holder, dict):
            holder[draw.choice(["x", "", "__class__", "d_model", 3])] = holder.pop(path[-1])
        elif kind < 0.9:
            del holder[path[-1]]
        else:
            holder[path[-1]] = copy.deepcopy(draw.choice([tree, holder]))
    return tree


def scrambled(content: bytes, draw: random.Random) -> bytes:
    """Bytes cut, flipped, repeated or replaced here and there."""
    content = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content) + 1)
        kind = draw.random()
        if kind < 0.3 and at < len(content):
            content[at] ^= 1 << draw.randrange(8)
        elif kind < 0.5:
            del content[at : at + draw.choice([1, 8, 10**6])]
        elif kind < 0.8:
            content[at:at] = draw.choice([b"\x00", b"\xff\xfe", b"[" * 3000, b'"', draw.randbytes(9), b"9" * 6000])
        else:
            content[at : at + 8] = draw.choice([b"\xff" * 8, b"\x00" * 8, (2**40).to_bytes(8, "little")])
    return bytes(content)
