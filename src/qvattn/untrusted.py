"""YAML and JSON from files that nobody vouches for: plain values, of a bounded size and depth.

A small file must not become a large one: YAML's aliases and merge keys are counted as often as they are used, before
anything is built of them. Whatever is wrong is a ValueError that says so in a line. Must never construct objects.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

LONGEST_YAML = 300_000
"""Characters; PyYAML reads some hundred thousand a second."""
MOST_NODES = 100_000
DEEPEST = 60
MOST_OPEN = 200
"""Brackets open at once anywhere in a text, quoted ones counted too: PyYAML takes seconds for two thousand."""


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """The document in `text`. Raises ValueError."""
    if len(text) > LONGEST_YAML:
        raise ValueError(f"{len(text):,} characters, allowed are {LONGEST_YAML:,}")
    if _most_open(text) > MOST_OPEN:
        raise ValueError(f"nested more than {DEEPEST} deep")
    try:
        reader = loader(text)
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            _check(node)
            return reader.construct_document(node)
        finally:
            reader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    except (AttributeError, LookupError, TypeError) as error:  # PyYAML trips over values that are not of their tag
        raise ValueError(f"a value is not of the type that its tag names ({error})") from None


def _most_open(text: str) -> int:
    """The most brackets that are open at once."""
    depth = most = 0
    for sign in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if sign in "[{" else max(0, depth - 1)
        most = max(most, depth)
    return most


def _check(root: yaml.Node) -> None:
    """Refuse documents that grow when their aliases are written out, and those that hold themselves."""
    sizes: dict[int, int] = {}
    above: set[int] = set()

    def size(node: yaml.Node, depth: int) -> int:
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        key = id(node)
        if key in above:
            raise ValueError("an alias stands inside of what it names")
        if key not in sizes:
            above.add(key)
            total = 1 + sum(size(child, depth + 1) for child in _children(node))
            above.remove(key)
            if total > MOST_NODES:
                raise ValueError(f"more than {MOST_NODES:,} values, aliases written out")
            sizes[key] = total
        return sizes[key]

    size(root, 0)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def parse_json(text: str) -> Any:
    """The value in `text`. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [item for held in level for item in _items(held)]
        if not level:
            return value
    raise ValueError(f"nested more than {DEEPEST} deep")


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
