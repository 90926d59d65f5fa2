"""What the arguments of `attend` must be, in words: shapes, types and views that fit together.

Raises UserError naming the argument, its shape and what is allowed. Not on the way of a request that works natively:
the native kernel's own checks take less time and say less, and this is asked when they refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..geometry import Geometry
from ..positions.base import DistanceTables, Rotation
from ..quantised import QuantisedStream
from .terms import ScoreTerm, ValueTerm


def validate(scores: Sequence[ScoreTerm], value: ValueTerm, geometry: Geometry, tables: DistanceTables | None) -> None:
    """Raise UserError unless the request can be served."""
    if not scores:
        raise UserError("scores=(): attention needs at least one scoring term")
    _four(scores[0].q, "scores[0].q", "[B, H, M, D]")
    B, H, M, _ = scores[0].q.shape
    _stream(value.stream, "value.stream")
    T = value.stream.shape[2]
    _filled(scores[0].q, "scores[0].q")
    for i, term in enumerate(scores):
        _term(term, f"scores[{i}]", B, H, M, T, scores[0].q.dtype)
    _value(value, B, H)
    _geometry(geometry, B, M, T)
    validate_tables(tables, geometry, H)


def _term(term: ScoreTerm, what: str, B: int, H: int, M: int, T: int, dtype: torch.dtype) -> None:
    _four(term.q, f"{what}.q", f"[B={B}, H={H}, M={M}, D]")
    if term.q.shape[:3] != (B, H, M):
        raise UserError(f"{what}.q has shape {tuple(term.q.shape)}, expected [B={B}, H={H}, M={M}, D]")
    if not term.q.is_floating_point() or term.q.dtype != dtype:
        raise UserError(f"{what}.q has dtype {term.q.dtype}, expected floating point, the same in all terms")
    _stream(term.stream, f"{what}.stream")
    if term.stream.shape[0] != B or term.stream.shape[2] != T:
        raise UserError(f"{what}.stream has shape {tuple(term.stream.shape)}, expected [B={B}, G, T={T}, W]")
    D = term.q.shape[-1]
    _view(what, term.start, D, term.stream.shape[3])
    _groups(what, term.groups, term.stream.shape[1], H)
    if term.gain is not None and tuple(term.gain.shape) not in ((D,), (1,)):
        raise UserError(f"{what}.gain has shape {tuple(term.gain.shape)}, expected [D={D}]")
    if type(term.rotation) is Rotation:  # others bring their own cosines and know what they are for
        at = term.rotation.positions.shape
        if len(at) != 2 or at[0] not in (1, B) or at[1] != T:
            raise UserError(f"{what}.rotation is for positions of shape {tuple(at)}, expected [B={B} or 1, T={T}]")
        if (term.rotation.dim or 0) > D:
            raise UserError(f"{what}.rotation turns {term.rotation.dim} elements, the keys have D={D}")


def _value(value: ValueTerm, B: int, H: int) -> None:
    rows, G, _, W = value.stream.shape
    if rows != B or not G:
        raise UserError(f"value.stream has shape {tuple(value.stream.shape)}, expected [B={B}, G of 1 or more, T, W]")
    _view("value", value.start, W - value.start if value.width is None else value.width, W)
    if not value.flat or value.groups is not None:
        _groups("value", value.groups, G, H)


def _geometry(geometry: Geometry, B: int, M: int, T: int) -> None:
    for name, positions in (("q_pos", geometry.q_pos), ("k_pos", geometry.k_pos)):
        if positions.dim() != 2 or positions.shape[0] not in (1, B):
            raise UserError(f"geometry.{name} has shape {tuple(positions.shape)}, expected [B={B} or 1, tokens]")
        if positions.dtype not in (torch.int32, torch.int64):
            raise UserError(f"geometry.{name} has dtype {positions.dtype}, allowed are int32, int64")
    if geometry.q_pos.shape[1] != M or geometry.k_pos.shape[1] != T:
        raise UserError(
            f"geometry is for M={geometry.q_pos.shape[1]}, T={geometry.k_pos.shape[1]}, the tensors have M={M}, T={T}"
        )
    if geometry.window is not None and geometry.window < 1:
        raise UserError(f"geometry.window={geometry.window}: allowed is 1 or more, or None")


def validate_tables(tables: DistanceTables | None, geometry: Geometry, H: int) -> None:
    """Raise UserError unless the tables cover the geometry's distances for H heads."""
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


def _four(x: Any, what: str, expected: str) -> None:
    if x.dim() != 4:
        raise UserError(f"{what} has shape {tuple(x.shape)}, expected {expected}")


def _filled(q: Tensor, what: str) -> None:
    if not q.shape[1]:
        raise UserError(f"{what} has shape {tuple(q.shape)}: at least one query head is needed")


def _stream(stream: Any, what: str) -> None:
    data = stream.data if isinstance(stream, QuantisedStream) else stream
    _four(data, what, "[B, G, T, W]")
    if isinstance(stream, QuantisedStream):
        if stream.data.dtype is not torch.int8 or not stream.scale.is_floating_point():
            raise UserError(f"{what} has dtypes {stream.data.dtype} and {stream.scale.dtype}, expected int8, float32")
        if stream.scale.shape != data.shape[:3]:
            raise UserError(f"{what} has scales of shape {tuple(stream.scale.shape)}, expected {tuple(data.shape[:3])}")
    elif not stream.is_floating_point():
        raise UserError(f"{what} has dtype {stream.dtype}, allowed are floating point and QuantisedStream (int8)")


def _view(what: str, start: int, size: int, width: int) -> None:
    if start < 0 or size < 0 or start + size > width:
        raise UserError(f"{what}: view {start}..{start + size} leaves the stream's width {width}")


def _groups(what: str, groups: tuple[int, ...] | None, shared: int, H: int) -> None:
    if groups is not None and (len(groups) != shared or sum(groups) != H or min(groups) < 1):
        raise UserError(f"{what}.groups={groups}: expected {shared} group sizes of 1 or more that sum to H={H}")
    if groups is None and (not shared or H % shared):
        raise UserError(f"{what} has G={shared} shared heads, which does not divide H={H}; give `groups`")
