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


def _validate(scores: Sequence[ScoreTerm], value: ValueTerm, geometry: Geometry, tables: DistanceTables | None) -> None:
    if not scores:
        raise UserError("scores=(): attention needs at least one scoring term")
    B, H, M, _ = scores[0].q.shape
    T = value.stream.shape[2]
    for i, term in enumerate(scores):
        if term.q.shape[:3] != (B, H, M):
            raise UserError(f"scores[{i}].q has shape {tuple(term.q.shape)}, expected [B={B}, H={H}, M={M}, D]")
        if term.stream.shape[0] != B or term.stream.shape[2] != T:
            raise UserError(f"scores[{i}].stream has shape {tuple(term.stream.shape)}, expected [B={B}, G, T={T}, W]")
        if term.start + term.q.shape[-1] > term.stream.shape[3]:
            raise UserError(
                f"scores[{i}]: view {term.start}..{term.start + term.q.shape[-1]} leaves the stream's width "
                f"{term.stream.shape[3]}"
            )
    for what, shape, groups in (
        *((f"scores[{i}]", t.stream.shape, t.groups) for i, t in enumerate(scores)),
        ("value", value.stream.shape, value.groups),
    ):
        if groups is not None and (len(groups) != shape[1] or sum(groups) != H):
            raise UserError(f"{what}.groups={groups}: expected {shape[1]} group sizes that sum to H={H}")
        if groups is None and H % shape[1] and not (what == "value" and value.flat):
            raise UserError(f"{what} has G={shape[1]} shared heads, which does not divide H={H}; give `groups`")
    if geometry.q_pos.shape[1] != M or geometry.k_pos.shape[1] != T:
        raise UserError(
            f"geometry is for M={geometry.q_pos.shape[1]}, T={geometry.k_pos.shape[1]}, the tensors have M={M}, T={T}"
        )
    _validate_tables(tables, geometry, H)


def _validate_tables(tables: DistanceTables | None, geometry: Geometry, H: int) -> None:
    if tables is None or torch.compiler.is_compiling():  # positions are not known while a graph is traced
        return
    low, high = geometry.delta_range
    for name, table in (("mul", tables.mul), ("add", tables.add), ("value_mul", tables.value_mul)):
        if table is None:
            continue
        if table.dim() != 2 or table.shape[0] != H:
            raise UserError(f"tables.{name} has shape {tuple(table.shape)}, expected [H={H}, N]")
        last = tables.delta_min + table.shape[1] - 1
        if tables.delta_min > low or last < high:
            raise UserError(
                f"tables.{name} covers distances {tables.delta_min} to {last}; this geometry needs {low} to {high} "
                "(geometry.delta_range)"
            )


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
    choice = choose(impl, scores, value, tables=tables, dropout=dropout)
    if choice.impl == "cpu":
        _validate_tables(tables, geometry, H=scores[0].q.shape[1])
        try:
            return _lifted(attend_cpu(scores, value, geometry, scale=scale, tables=tables), value)
        except UserError:  # it checks shapes in less time, with fewer words
            _validate(scores, value, geometry, tables)
            raise
    _validate(scores, value, geometry, tables)
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
    _validate(scores, value, geometry, tables)
    out, a = attend_reference(scores, value, geometry, scale=scale, tables=tables, dropout=dropout)
    return _lifted(out, value), a


def _lifted(out: Tensor, value: ValueTerm) -> Tensor:
    return out if value.lift is None else torch.einsum("bhmw,hwd->bhmd", out, value.lift.to(out.dtype))
