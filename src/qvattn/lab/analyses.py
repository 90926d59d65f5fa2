"""Analyses that lie beside the runs they are of, as sections of the report.

`qvattn affinity`, `diffusion`, `distance`, `extrapolate`, `operators` write their numbers as JSON; put into the
directory of the runs under their usual names, the report shows them. Associative recall is read from the runs
themselves. Nothing is measured here, and what a file holds is never trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import page
from .runs import find_runs, is_complete, read_json, read_run

Make = Callable[[dict[str, Any]], page.Section]


def sections(directories: Sequence[Path]) -> list[page.Section]:
    """Whatever is found in these directories, each kind in the order of the table below.

    Raises UserError for a file of such a name that holds something else.
    """
    found = []
    for directory in dict.fromkeys(directories):
        found += _recall(directory)
        for name, make in _MAKERS.items():
            path = directory / f"{name}.json"
            if path.is_file():
                found.append(_made(path, name, make))
    return found


def _made(path: Path, name: str, make: Make) -> page.Section:
    content = read_json(path)
    try:
        return make(content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, StopIteration) as error:
        raise UserError(
            f"{path} is not what this version's `qvattn {_COMMANDS.get(name, name)}` writes ({error!r}); "
            "write it again, or move it away"
        ) from None


def _affinity(content: dict[str, Any]) -> page.Section:
    from .affinity_page import section

    return section(content["runs"])


def _diffusion(content: dict[str, Any]) -> page.Section:
    from .diffusion_page import section

    return section(content["runs"], content["baseline"])


def _distance(content: dict[str, Any]) -> page.Section:
    from .distance_page import section

    return section(content["runs"])


def _extrapolation(content: dict[str, Any]) -> page.Section:
    from .extrapolation import summary
    from .extrapolation_page import section

    baseline = next(line["name"] for line in content["variants"] if line["is_baseline"])
    return section(summary(content["runs"], baseline=baseline), content["runs"])


def _operators(content: dict[str, Any]) -> page.Section:
    from .operators_page import section

    return section(content)


_MAKERS: dict[str, Make] = {
    "affinity": _affinity,
    "diffusion": _diffusion,
    "distance": _distance,
    "extrapolation": _extrapolation,
    "operators": _operators,
}
_COMMANDS = {"extrapolation": "extrapolate"}


def _recall(directory: Path) -> list[page.Section]:
    done = [read_run(path) for path in find_runs(directory) if is_complete(path)]
    if not any(run.recipe.get("data", {}).get("corpus") == "mqar" for run in done):
        return []
    from .recall import recall_rows
    from .recall_page import section

    return [section(recall_rows([directory]))]
