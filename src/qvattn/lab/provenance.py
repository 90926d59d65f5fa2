"""What runs have in common and in what they differ: recipes and environments, flattened to dotted keys.

Only compares what the run directories hold; must never ask the present machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qvattn.lab.runs import RunRecord, flatten

_OWN = {"seed", "train.seed", "name", "run_dir", "time", "started", "date", "argv", "command", "compare"}


def common_and_own(trees: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split mappings into what all share and, for each, what is its own; keys are dotted."""
    flat = [flatten(dict(tree)) if tree else {} for tree in trees]
    first = flat[0] if flat else {}
    common = {key: value for key, value in first.items() if all(key in other and other[key] == value for other in flat)}
    return common, [{key: value for key, value in tree.items() if key not in common} for tree in flat]


def shared_environment(runs: Iterable[RunRecord]) -> dict[str, Any]:
    """The environment of a set of runs: one value where they agree, all of them joined by `or` where not."""
    seen: dict[str, list[str]] = {}
    for run in runs:
        for key, value in flatten(run.environment).items() if run.environment else ():
            texts = seen.setdefault(key, [])
            if value is not None and str(value) not in texts:
                texts.append(str(value))
    shared = {key: " or ".join(texts) for key, texts in seen.items() if texts and key.split(".")[0] not in _OWN}
    return _nest(shared)


def _nest(flat: Mapping[str, str]) -> dict[str, Any]:
    """Group dotted keys by their first part, so that `versions.torch` is shown under `versions`."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        if not rest:
            nested[head] = value
        elif isinstance(nested.setdefault(head, {}), dict):
            nested[head][rest] = value
    return nested
