"""What a check says: a claim in plain words, measured numbers with their bounds, and the steps that led there.

Only data. A number that is not finite never passes a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...errors import UserError

Number = int | float


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measured number, its bound in words (None: shown for information only), and whether it is kept."""

    name: str
    value: Number | str
    bound: str | None = None
    ok: bool = True


def at_most(name: str, value: Number, limit: Number) -> Measure:
    return Measure(name=name, value=value, bound=f"<= {short(limit)}", ok=bool(value <= limit))


def at_least(name: str, value: Number, limit: Number) -> Measure:
    return Measure(name=name, value=value, bound=f">= {short(limit)}", ok=bool(value >= limit))


def above(name: str, value: Number, limit: Number) -> Measure:
    return Measure(name=name, value=value, bound=f"> {short(limit)}", ok=bool(value > limit))


def exactly(name: str, value: Number, expected: Number) -> Measure:
    return Measure(name=name, value=value, bound=f"= {short(expected)}", ok=bool(value == expected))


def information(name: str, value: Number | str) -> Measure:
    return Measure(name=name, value=value)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a check: what happens, on which shapes, and why."""

    what: str
    shapes: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Details:
    """A table of a check: one row a layer, a stream or a variant."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Number | str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The outcome of one check.

    notes: what is and what is not shown by the numbers. details: a table printed below them.
    """

    name: str
    claim: str
    measures: Sequence[Measure]
    steps: Sequence[Step] = ()
    details: Details | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        """Whether every bound is kept; a check that bounds nothing has shown nothing."""
        bounded = [measure for measure in self.measures if measure.bound is not None]
        return bool(bounded) and all(measure.ok for measure in bounded)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        table = self.details
        return {
            "name": self.name,
            "passed": self.passed,
            "claim": self.claim,
            "measures": [vars(measure) for measure in self.measures],
            "details": None
            if table is None
            else {"title": table.title, "rows": [dict(zip(table.columns, row, strict=True)) for row in table.rows]},
            "notes": list(self.notes),
            "steps": [vars(step) for step in self.steps],
        }


def result(name: str, claim: str, measures: Sequence[Measure], **more: Any) -> CheckResult:
    """A CheckResult; raises UserError where nothing could be measured."""
    if not any(measure.bound for measure in measures):
        raise UserError(f"check {name}: nothing could be measured on these sentences")
    return CheckResult(name=name, claim=claim, measures=measures, **more)


def short(value: Number | str) -> str:
    """A number as people read it."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}"


def shape(tensor: Tensor | Sequence[int]) -> str:
    """(1, 8, 12, 64)"""
    sizes = tensor.shape if isinstance(tensor, Tensor) else tensor
    return "(" + ", ".join(str(int(size)) for size in sizes) + ")"
