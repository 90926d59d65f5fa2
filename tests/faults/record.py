"""How much the reliability tests try, and how often what happened.

`benchmarks/reliability.py` sets the variables, runs the tests with larger numbers and writes docs/reliability.md from
the counts. Without them the numbers are small, and nothing is written.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from pathlib import Path

EXAMPLES = int(os.environ.get("QVATTN_EXAMPLES", "25"))
"""Inputs that every fuzzing test tries."""
KILLS = int(os.environ.get("QVATTN_KILLS", "5"))
"""Random moments at which every killing test kills."""
REQUESTS = int(os.environ.get("QVATTN_REQUESTS", "150"))
"""Requests of the soak."""
SECONDS = float(os.environ.get("QVATTN_SECONDS", "inf"))
"""Seconds after which the soak ends, however many requests it has served."""

_counts: Counter[tuple[str, str]] = Counter()


def count(what: str, outcome: str, number: int = 1) -> None:
    """Note that `what` ended `number` times in `outcome`."""
    _counts[what, outcome] += number


@atexit.register
def _write() -> None:
    folder = os.environ.get("QVATTN_COUNTS")
    if folder and _counts:
        rows = [[what, outcome, number] for (what, outcome), number in sorted(_counts.items())]
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(rows, indent=1))
