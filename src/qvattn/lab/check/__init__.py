"""Statements about cached decoding, each run on a trained model with real sentences.

One module a statement; `CHECKS` names them all. A check only measures: it must leave the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...errors import UserError
from . import decoding, history, jacobians, markov, memory, queries, scores
from .result import CheckResult
from .subject import Sample, Subject

CHECKS: dict[str, Callable[[Subject], CheckResult]] = {
    module.NAME: module.check for module in (decoding, queries, history, scores, markov, jacobians, memory)
}


def run_checks(subject: Subject, only: Sequence[str] = ()) -> Iterator[CheckResult]:
    """The results one by one, in the order of `CHECKS`; `only`: of the checks named. Errors: an unknown name."""
    for name in only:
        if name not in CHECKS:
            raise UserError(f"check {name!r}: allowed are {', '.join(CHECKS)}")
    for name, check in CHECKS.items():
        if not only or name in only:
            yield check(subject)


__all__ = ["CHECKS", "CheckResult", "Sample", "Subject", "run_checks"]
