"""The only entrance to the softmax: validate, choose a kernel, run it.

`impl="auto"` may choose, and `choose` tells what and why; an explicit `impl` never falls back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from ..geometry import Geometry
from ..positions.base import DistanceTables
from .cpu import attend_cpu, cpu_refuses
from .flex import attend_flex, flex_refuses
from .reference import attend_reference
from .sdpa import attend_sdpa, sdpa_refuses
from .terms import ScoreTerm, ValueTerm
from .validate import validate, validate_tables

IMPLS = ("auto", "reference", "sdpa", "flex", "cpu")


@dataclass(frozen=True)
class Choice:
    """The kernel that serves a request, and why."""

    impl: str
    why: str


def choose(
    impl: str,
    scores: Sequence[ScoreTerm],
    value: ValueTerm,
    *,
    tables: DistanceTables | None = None,
    dropout: float = 0.0,
) -> Choice:
    """What `impl` resolves to. Raises UserError where an explicit `impl` cannot serve the request."""
    if impl == "auto":
        if cpu_refuses(scores, value, tables, dropout) is None:
            return Choice("cpu", "a few queries on the CPU")
        refusal = sdpa_refuses(tables, dropout)
        return Choice("reference", refusal) if refusal else Choice("sdpa", "plain scores")
    if impl not in IMPLS:
        raise UserError(f"impl={impl!r}: allowed are {', '.join(IMPLS)}")
    refusal = None
    if impl == "sdpa":
        refusal = sdpa_refuses(tables, dropout)
    elif impl == "flex":
        refusal = flex_refuses(scores, value, tables, dropout)
    elif impl == "cpu":
        refusal = cpu_refuses(scores, value, tables, dropout)
    if refusal:
        raise UserError(f"impl={impl!r} cannot serve this: {refusal}; use impl='reference' or 'auto'")
    return Choice(impl, "asked for")


def attend(
    scores: Sequence[ScoreTerm],
    value: ValueTerm,
    geometry: Geometry,
    *,
    scale: float,
    tables: DistanceTables | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Attention over streams, (B, H, M, D_out).

    scores: the scoring terms; their products are summed.  value: what is averaged.
    geometry: who sees whom.  scale: multiplies the summed products.  tables: factors over distance.
    dropout: on the normalised weights.  impl: one of IMPLS.

    Raises UserError naming the argument, its shape and what is allowed.
    """
    if not scores:
        raise UserError("scores=(): attention needs at least one scoring term")
    try:
        return _attend(scores, value, geometry, scale, tables, dropout, impl)
    except UserError:
        raise
    except Exception:  # if it is the arguments, say which
        validate(scores, value, geometry, tables)
        raise


def _attend(
    scores: Sequence[ScoreTerm],
    value: ValueTerm,
    geometry: Geometry,
    scale: float,
    tables: DistanceTables | None,
    dropout: float,
    impl: str,
) -> Tensor:
    choice = choose(impl, scores, value, tables=tables, dropout=dropout)
    if choice.impl == "cpu":
        validate_tables(tables, geometry, H=scores[0].q.shape[1])
        try:
            return _lifted(attend_cpu(scores, value, geometry, scale=scale, tables=tables), value)
        except UserError:  # it checks shapes in less time, with fewer words
            validate(scores, value, geometry, tables)
            raise
    validate(scores, value, geometry, tables)
    if choice.impl == "sdpa":
        out = attend_sdpa(scores, value, geometry, scale=scale, tables=tables)
    elif choice.impl == "flex":
        out = attend_flex(scores, value, geometry, scale=scale, tables=tables)
    else:
        out, _ = attend_reference(scores, value, geometry, scale=scale, tables=tables, dropout=dropout)
    return _lifted(out, value)


def attend_with_weights(
    scores: Sequence[ScoreTerm],
    value: ValueTerm,
    geometry: Geometry,
    *,
    scale: float,
    tables: DistanceTables | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As `attend`, through the reference kernel, with the weights after the softmax (B, H, M, T).

    The weights are those before dropout and before `value_mul`: each row of a seeing query sums to 1.
    """
    validate(scores, value, geometry, tables)
    out, a = attend_reference(scores, value, geometry, scale=scale, tables=tables, dropout=dropout)
    return _lifted(out, value), a


def _lifted(out: Tensor, value: ValueTerm) -> Tensor:
    return out if value.lift is None else torch.einsum("bhmw,hwd->bhmd", out, value.lift.to(out.dtype))
