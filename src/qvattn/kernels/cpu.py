"""The native CPU decode kernel: a few queries over cached streams, every stream read once, nothing copied.

What a request may be is said by `cpu_refuses`; the loops are in csrc/. Requests go to the library as one row of
integers (`_request`, read by `read_request` in csrc/decode.cpp): addresses, dtypes and strides, so that a call costs
microseconds. Under `torch.compile` and export the same request goes through the operator `qvattn::decode`, which the
compiler keeps as one node; called directly, that detour would cost more time than a short step itself.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import UserError
from ..geometry import Geometry
from ..positions.base import DistanceTables, Rotation
from ..quantised import QuantisedStream
from ._native import native, why_missing
from .terms import ScoreTerm, ValueTerm

MOST_QUERIES = 16
"""Largest M: from about there on, a matrix multiplication that reuses keys among queries is the better tool."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_FLOATS = frozenset(_DTYPES) - {torch.int8}
_LAYOUTS = {"half": 1, "interleaved": 2}


def cpu_refuses(
    scores: Sequence[ScoreTerm], value: ValueTerm, tables: DistanceTables | None, dropout: float
) -> str | None:
    """Why the native kernel cannot serve this request, or None."""
    missing = why_missing()
    if missing:
        return missing
    if dropout:
        return "it has no dropout"
    q = scores[0].q
    if not q.is_cpu:
        return f"the queries are on {q.device}"
    if q.shape[2] > MOST_QUERIES:
        return f"M={q.shape[2]} queries, allowed are up to {MOST_QUERIES}"
    if torch.is_grad_enabled() and _needs_grad(scores, value, tables):
        return "a gradient is needed; it serves decoding only, under torch.no_grad() or torch.inference_mode()"
    for i, term in enumerate(scores):
        if term.q.dtype not in _FLOATS:
            return f"scores[{i}].q has dtype {term.q.dtype}, allowed are float32, bfloat16, float16"
        if refusal := _stream_refusal(term.stream):
            return f"scores[{i}].stream {refusal}"
    if value.stream is scores[0].stream:
        return None
    refusal = _stream_refusal(value.stream)
    return f"value.stream {refusal}" if refusal else None


def _needs_grad(scores: Sequence[ScoreTerm], value: ValueTerm, tables: DistanceTables | None) -> bool:
    tensors: list[Any] = [value.stream, *(x for t in scores for x in (t.q, t.stream, t.gain))]
    if tables is not None:
        tensors += [tables.mul, tables.add, tables.value_mul]
    return any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def _stream_refusal(stream: Tensor | QuantisedStream) -> str | None:
    if isinstance(stream, QuantisedStream):
        data, scale = stream.data, stream.scale
        if data.dtype is not torch.int8 or scale.dtype is not torch.float32:
            return f"has dtypes {data.dtype} and {scale.dtype}, expected int8 and float32"
        if scale.shape[2] > 1 and scale.stride(2) != 1:
            return f"has scales with stride {scale.stride(2)} between tokens, expected 1"
    elif stream.dtype in _FLOATS:
        data = stream
    else:
        return f"has dtype {stream.dtype}, allowed are float32, bfloat16, float16 and QuantisedStream (int8)"
    if not data.is_cpu:
        return f"is on {data.device}"
    if data.stride(3) != 1 and data.shape[3] > 1:
        return f"has stride {data.stride(3)} between the elements of a token, expected 1"
    return None


def attend_cpu(
    scores: Sequence[ScoreTerm],
    value: ValueTerm,
    geometry: Geometry,
    *,
    scale: float,
    tables: DistanceTables | None = None,
) -> Tensor:
    """As `attend_reference`, without weights. The request must be one that `cpu_refuses` does not refuse.

    Raises UserError where shapes do not fit together: the library trusts what it is told.
    """
    if torch.compiler.is_compiling():
        tensors, meta = _flatten(scores, value, geometry, tables)
        return cast(Tensor, torch.ops.qvattn.decode(tensors, meta, scale))
    return _decode(scores, value, geometry, tables, scale)


# ---- the direct way ------------------------------------------------------------------------------


def _decode(
    scores: Sequence[ScoreTerm],
    value: ValueTerm,
    geometry: Geometry,
    tables: DistanceTables | None,
    scale: float,
) -> Tensor:
    library = native()
    if library is None:
        raise UserError(f"impl='cpu': {why_missing()}")
    request, out, keep = _request(scores, value, geometry, tables)
    library.decode(request.buffer_info()[0], scale, torch.get_num_threads())
    del keep  # what the request points to has lived until here
    return out


def _request(
    scores: Sequence[ScoreTerm], value: ValueTerm, geometry: Geometry, tables: DistanceTables | None
) -> tuple[array[int], Tensor, list[Any]]:
    """The request, the output it points to, and whatever else must stay alive."""
    B, H, M, _ = scores[0].q.shape
    if not (B and H and M):
        raise UserError(f"queries have shape {tuple(scores[0].q.shape)}: there is nothing to attend for")
    T = value.stream.shape[2]
    width = value.stream.shape[3] - value.start if value.width is None else value.width
    where: _Where = geometry.recall("cpu", lambda: _where(geometry))
    for name, x, length in (("q_pos", where.q_pos, M), ("k_pos", where.k_pos, T)):
        if x.shape[1] != length or x.shape[0] not in (1, B):
            raise UserError(f"geometry.{name} has shape {tuple(x.shape)}, expected [{B} or 1, {length}]")
    dtype = scores[0].q.dtype
    out = torch.empty((B, H, M, width * value.stream.shape[1] if value.flat else width), dtype=dtype)
    keep: list[Any] = [where]
    fields = [len(scores), B, H, M, T, out.data_ptr(), _DTYPES[dtype], *where.fields]
    fields += _NO_TABLES if tables is None else _table_fields(tables, H, keep)
    fields.append(value.flat)
    fields += _view_fields(value.stream, B, None if value.flat else H, T, value.start, width, value.groups)
    for term in scores:
        fields += _term_fields(term, B, H, M, T, where.k_pos, keep)
    return array("q", fields), out, keep


_NO_TABLES = (0,) * 8


@dataclass(frozen=True)
class _Where:
    """What the library is told of a geometry, the same for all layers."""

    q_pos: Tensor
    k_pos: Tensor
    fields: tuple[int, ...]


def _where(geometry: Geometry) -> _Where:
    if geometry.window is not None and geometry.window < 1:
        raise UserError(f"geometry.window={geometry.window}: allowed is 1 or more, or None")
    q_pos, k_pos = (
        x if x.dtype is torch.int32 and x.stride(1) == 1 else x.to(torch.int32).contiguous()
        for x in (geometry.q_pos, geometry.k_pos)
    )
    # one row of positions serves all batch rows
    rows = (x.stride(0) if x.shape[0] > 1 else 0 for x in (q_pos, k_pos))
    window = -1 if geometry.window is None else geometry.window
    fields = (q_pos.data_ptr(), next(rows), k_pos.data_ptr(), next(rows), geometry.causal, window)
    return _Where(q_pos, k_pos, fields)


def _table_fields(tables: DistanceTables, H: int, keep: list[Any]) -> list[int]:
    fields: list[int] = []
    size = next((t.shape[1] for t in (tables.mul, tables.add, tables.value_mul) if t is not None), 0)
    known: dict[int, Tensor] = {}
    for table in (tables.mul, tables.add, tables.value_mul):
        if table is None:
            fields += (0, 0)
            continue
        if table.shape != (H, size) or size == 0:
            raise UserError(f"a table has shape {tuple(table.shape)}, expected [H={H}, {max(size, 1)}]")
        if table.dtype is not torch.float32 or (size > 1 and table.stride(1) != 1):
            table = known.setdefault(id(table), table.to(torch.float32).contiguous())
            keep.append(table)
        fields += (table.data_ptr(), table.stride(0))
    return [*fields, size, tables.delta_min]


def _view_fields(
    stream: Tensor | QuantisedStream,
    B: int,
    H: int | None,
    T: int,
    start: int,
    width: int,
    groups: tuple[int, ...] | None,
) -> tuple[int, ...]:
    """The view of `width` elements from `start`, read by H heads (None: flat, by all of them)."""
    rows, G, tokens, W = stream.shape
    shared = G and (H is None or (H % G == 0 if groups is None else len(groups) == G and sum(groups) == H))
    if rows != B or tokens != T or not 0 <= start <= start + width <= W or not shared:
        raise UserError(
            f"a stream has shape {tuple(stream.shape)}, read from {start} for {width} elements by {H} heads in groups "
            f"{groups}; expected [B={B}, G, T={T}, W] with the view inside W and groups that fit"
        )
    scale: tuple[int, ...] = (0, 0, 0, 0)
    if isinstance(stream, QuantisedStream):
        if stream.scale.shape != (B, G, T):
            raise UserError(f"scales have shape {tuple(stream.scale.shape)}, expected {(B, G, T)}")
        scale = (stream.scale.data_ptr(), *stream.scale.stride())
        stream = stream.data
    b, g, t, _ = stream.stride()
    address = stream.data_ptr() + start * stream.element_size()
    bounds = 0 if groups is None else _bounds(groups).buffer_info()[0]
    return (address, _DTYPES[stream.dtype], b, g, t, width, *scale, G, bounds)


@functools.lru_cache(maxsize=1024)
def _bounds(groups: tuple[int, ...]) -> array[int]:
    """First query head of each shared head, and H. Kept by the cache, since requests point to it."""
    if min(groups) < 1:
        raise UserError(f"groups={groups}: allowed are sizes of 1 or more")
    return array("i", accumulate(groups, initial=0))


_NO_ROTATION: tuple[int, ...] = (0,) * 7


def _term_fields(term: ScoreTerm, B: int, H: int, M: int, T: int, k_pos: Tensor, keep: list[Any]) -> tuple[int, ...]:
    q = term.q
    rows, heads, queries, D = q.shape
    if rows != B or heads != H or queries != M:
        raise UserError(f"queries have shape {tuple(q.shape)}, expected [B={B}, H={H}, M={M}, D]")
    b, h, m, d = q.stride()
    if d != 1 and D > 1:
        q = q.contiguous()
        keep.append(q)
        b, h, m, _ = q.stride()
    gain = 0
    if term.gain is not None:
        vector = term.gain.to(torch.float32).expand(D).contiguous()
        keep.append(vector)
        gain = vector.data_ptr()
    rotation = _NO_ROTATION
    if term.rotation is not None:
        cos, sin, by_position = _turns(term.rotation, D, k_pos)
        if 2 * cos.shape[-1] > D or (not by_position and (cos.shape[0] not in (1, B) or cos.shape[1] != T)):
            shape = tuple(cos.shape)
            raise UserError(f"a rotation has tables of shape {shape}, expected [{B} or 1, {T}, up to {D // 2}]")
        keep += (cos, sin)
        rotation = (_LAYOUTS[term.rotation.layout], 2 * cos.shape[-1], cos.data_ptr(), sin.data_ptr())
        if by_position:
            rotation += (0, cos.stride(0), cos.shape[0])
        else:
            rotation += (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), 0)
    view = _view_fields(term.stream, B, H, T, term.start, D, term.groups)
    return (q.data_ptr(), _DTYPES[q.dtype], b, h, m, gain, *rotation, *view)


# ---- rotation on read ----------------------------------------------------------------------------

MOST_TURNS = 2**17
"""Positions up to which rotations are tabled whatever the length of the past."""
_turns_by_position: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}


def _turns(rotation: Rotation | _Turned, width: int, k_pos: Tensor) -> tuple[Tensor, Tensor, bool]:
    """cos and sin by position (P, pairs), made once for all steps and layers; or else by token (B or 1, T, pairs)."""
    if type(rotation) is not Rotation or rotation.positions.shape != k_pos.shape:
        return *rotation.tables(width), False
    positions = rotation.positions
    if positions.data_ptr() != k_pos.data_ptr() and not torch.equal(positions.to(k_pos.dtype), k_pos):
        return *rotation.tables(width), False
    needed = int(k_pos.max()) + 1 if k_pos.numel() else 1
    if needed > MOST_TURNS and needed > 4 * k_pos.shape[1]:  # a few tokens, far out
        return *rotation.tables(width), False
    key = (width, *rotation.options)
    known = _turns_by_position.get(key)
    if known is None or known[0].shape[0] < needed:
        if len(_turns_by_position) >= 16:
            _turns_by_position.clear()
        everywhere = rotation.at(torch.arange(max(256, 2 * needed))[None])
        cos, sin = everywhere.tables(width)
        known = _turns_by_position[key] = cos[0].contiguous(), sin[0].contiguous()
    return *known, True


# ---- the operator, for torch.compile and export --------------------------------------------------


@dataclass(frozen=True)
class _Turned:
    """A rotation whose tables are already there."""

    cos: Tensor
    sin: Tensor
    layout: str

    def tables(self, width: int) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin


class _Packer:
    """Tensors and integers in the order they are asked for; None and streams in int8 leave a mark."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.meta: list[int] = []

    def tensor(self, x: Tensor | None) -> None:
        self.meta.append(x is not None)
        if x is not None:
            self.tensors.append(x)

    def stream(self, x: Tensor | QuantisedStream) -> None:
        self.tensor(x.data if isinstance(x, QuantisedStream) else x)
        self.tensor(x.scale if isinstance(x, QuantisedStream) else None)

    def optional(self, x: int | None) -> None:
        self.meta += (x is not None, x or 0)

    def groups(self, x: tuple[int, ...] | None) -> None:
        self.optional(None if x is None else len(x))
        self.meta += x or ()


class _Unpacker:
    """The reverse of `_Packer`."""

    def __init__(self, tensors: Sequence[Tensor], meta: Sequence[int]) -> None:
        self._tensors, self._meta = iter(tensors), iter(meta)

    def integer(self) -> int:
        return next(self._meta)

    def tensor(self) -> Tensor | None:
        return next(self._tensors) if next(self._meta) else None

    def stream(self) -> Any:
        data, scale = self.tensor(), self.tensor()
        assert data is not None
        return data if scale is None else QuantisedStream(data, scale)

    def optional(self) -> int | None:
        there, x = next(self._meta), next(self._meta)
        return x if there else None

    def groups(self) -> tuple[int, ...] | None:
        count = self.optional()
        return None if count is None else tuple(self.integer() for _ in range(count))


def _flatten(
    scores: Sequence[ScoreTerm], value: ValueTerm, geometry: Geometry, tables: DistanceTables | None
) -> tuple[list[Tensor], list[int]]:
    """The request as a list of tensors and a list of integers, which is all an operator may take."""
    to = _Packer()
    to.tensor(geometry.q_pos)
    to.tensor(geometry.k_pos)
    to.meta.append(geometry.causal)
    to.optional(geometry.window)
    to.optional(None if tables is None else tables.delta_min)
    if tables is not None:
        for table in (tables.mul, tables.add, tables.value_mul):
            to.tensor(table)
    to.stream(value.stream)
    to.meta.append(value.start)
    to.optional(value.width)
    to.groups(value.groups)
    to.meta.append(value.flat)
    to.meta.append(len(scores))
    for term in scores:
        to.tensor(term.q)
        to.stream(term.stream)
        to.meta.append(term.start)
        to.groups(term.groups)
        to.tensor(term.gain)
        to.meta.append(0 if term.rotation is None else _LAYOUTS[term.rotation.layout])
        if term.rotation is not None:
            for table in term.rotation.tables(term.q.shape[3]):
                to.tensor(table)
    return to.tensors, to.meta


def _unflatten(
    tensors: Sequence[Tensor], meta: Sequence[int]
) -> tuple[list[ScoreTerm], ValueTerm, Geometry, DistanceTables | None]:
    of = _Unpacker(tensors, meta)
    q_pos, k_pos = cast(Tensor, of.tensor()), cast(Tensor, of.tensor())
    geometry = Geometry(q_pos, k_pos, causal=bool(of.integer()), window=of.optional())
    delta_min = of.optional()
    tables = None if delta_min is None else DistanceTables(delta_min, of.tensor(), of.tensor(), of.tensor())
    value = ValueTerm(
        stream=of.stream(), start=of.integer(), width=of.optional(), groups=of.groups(), flat=bool(of.integer())
    )
    scores = []
    for _ in range(of.integer()):
        term = ScoreTerm(
            q=cast(Tensor, of.tensor()), stream=of.stream(), start=of.integer(), groups=of.groups(), gain=of.tensor()
        )
        layout = of.integer()
        if layout:
            name = next(n for n, code in _LAYOUTS.items() if code == layout)
            turned = _Turned(cast(Tensor, of.tensor()), cast(Tensor, of.tensor()), name)
            term = replace(term, rotation=cast(Rotation, turned))
        scores.append(term)
    return scores, value, geometry, tables


@torch.library.custom_op("qvattn::decode", mutates_args=())
def _decode_op(tensors: Sequence[Tensor], meta: Sequence[int], scale: float) -> Tensor:
    return _decode(*_unflatten(tensors, meta), scale)


@_decode_op.register_fake
def _(tensors: Sequence[Tensor], meta: Sequence[int], scale: float) -> Tensor:
    scores, value, _, _ = _unflatten(tensors, meta)
    q, (_, G, _, W) = scores[0].q, value.stream.shape
    width = W - value.start if value.width is None else value.width
    return q.new_empty((*q.shape[:3], width * G if value.flat else width))
