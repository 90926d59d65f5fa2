"""Calls `attend` with arguments that do not fit, or that fit in odd ways; run as a process, which must not die.

    python kernel_cases.py CASES SEED

Every case ends in a result equal to the reference kernel's, or in ValueError (UserError is one). Prints the counts as
JSON; before every case its number goes to stderr, so that a crash names it.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from qvattn.geometry import Geometry
from qvattn.kernels import attend
from qvattn.kernels.terms import ScoreTerm, ValueTerm
from qvattn.positions.base import DistanceTables, Rotation
from qvattn.quantised import QuantisedStream, quantise

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STRANGE = (torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8)
MEMORY = 12 * 2**30


def tensor(draw: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Of this shape, with contiguous, sliced, transposed, expanded or overlapping storage."""
    if any(n < 0 for n in shape):
        shape = [abs(n) for n in shape]
    if dtype in (torch.int64, torch.uint8, torch.bool, torch.int8):
        return torch.randint(0, 2, shape).to(dtype)
    x = torch.randn(shape).to(dtype)
    kind = draw.randrange(6)
    if kind == 0 and len(shape) == 4:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == 1 and len(shape) == 4:
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if kind == 2 and shape:
        wide = torch.full([*shape[:-1], shape[-1] + 5], float("nan")).to(dtype)
        wide[..., : shape[-1]] = x
        return wide[..., : shape[-1]]
    if kind == 3 and shape and shape[0] > 0:
        return x[:1].expand(shape)
    if kind == 4 and len(shape) == 4 and shape[2] > 0:
        return x[:, :, :1].expand(shape)
    return x


def skewed(draw: random.Random, value: Any, odd: list[Any]) -> Any:
    """The value, or now and then another."""
    return draw.choice(odd) if draw.random() < 0.06 else value


def stream(draw: random.Random, shape: list[int], dtype: torch.dtype) -> Any:
    if dtype is not torch.int8:
        return tensor(draw, shape, dtype)
    small = quantise(torch.randn([abs(n) for n in shape]))
    scale = skewed(draw, small.scale, [small.scale[..., :0], small.scale[:0], small.scale.double(), small.scale.mT])
    return QuantisedStream(small.data, scale)


def sizes(draw: random.Random, shape: list[int]) -> list[int]:
    """The shape, or now and then one that does not fit."""
    shape = [skewed(draw, n, [0, 1, n + 1, 2 * n, 7]) for n in shape]
    return skewed(draw, shape, [shape[:-1], [*shape, 2], []])


def case(draw: random.Random) -> dict[str, Any]:
    B, H, M = draw.randint(1, 3), draw.choice([1, 2, 4, 6]), draw.choice([1, 1, 2, 5, 16, 17])
    T, D = draw.choice([0, 1, 3, 17, 64, 130]), draw.choice([1, 2, 6, 8, 16, 33, 64])
    dtype = skewed(draw, draw.choice([*FLOATS, torch.int8]), list(STRANGE))
    q_dtype = skewed(draw, torch.float32 if dtype is torch.int8 else dtype, [*FLOATS, *STRANGE, torch.int8])
    G = draw.choice([g for g in range(1, H + 1) if H % g == 0])
    width = D + draw.choice([0, 0, 3])
    geometry = Geometry(
        positions(draw, B, M, T), positions(draw, B, T, T), causal=draw.random() < 0.7,
        window=skewed(draw, draw.choice([None, None, 1, 9]), [0, -1, 2**31]),
    )  # fmt: skip
    groups = skewed(draw, None, [(1,) * G, (H,), (H, 0), (0,) * G, (-1, H + 1), (H - 1, 1), (2**31,), ()])
    start = skewed(draw, draw.choice([0, 0, width - D]), [-1, 1, width, 2**40, -(2**40)])
    terms = [
        ScoreTerm(
            q=tensor(draw, sizes(draw, [B, H, M, D]), q_dtype),
            stream=stream(draw, sizes(draw, [B, G, T, width]), dtype), start=start, groups=groups,
            gain=skewed(draw, None, [torch.ones(D), torch.ones(1), torch.ones(D + 1), torch.ones(D, 2), torch.ones(0)]),
            rotation=rotation(draw, geometry, D),
        )
        for _ in range(draw.choice([1, 1, 2]))
    ]  # fmt: skip
    value = ValueTerm(
        stream=terms[0].stream if draw.random() < 0.4 else stream(draw, sizes(draw, [B, G, T, width]), dtype),
        start=skewed(draw, 0, [-1, 1, 2**40]), width=skewed(draw, None, [0, 1, -1, width, width + 1, 2**40, D]),
        groups=skewed(draw, groups, [None, (H,), (0,)]), flat=draw.random() < 0.1,
    )  # fmt: skip
    return {
        "scores": skewed(draw, terms, [[], terms[:1]]),
        "value": value,
        "geometry": geometry,
        "tables": tables(draw, H, geometry) if draw.random() < 0.3 else None,
        "scale": skewed(draw, 0.3, [0.0, -1.0, 1e30]),
    }


def positions(draw: random.Random, B: int, count: int, T: int) -> Tensor:
    """Positions (B, count) that end at T - 1, padded on the left, or odd ones."""
    rows = torch.arange(T - count, T).clamp(min=-1).expand(draw.choice([B, B, 1]), count).clone()
    rows = rows.to(draw.choice([torch.int32, torch.int64]))
    if draw.random() < 0.05 and rows.numel():
        rows.view(-1)[draw.randrange(rows.numel())] = draw.choice([-5, 2**31 - 1, 2**30, 10**6, -(2**31)])
    return skewed(draw, rows, [rows[:, :0], rows[:, :1], rows[0], rows.float(), torch.zeros(B + 1, count).int()])


def rotation(draw: random.Random, geometry: Geometry, D: int) -> Rotation | None:
    if draw.random() < 0.85 or D < 2:
        return None
    at = skewed(draw, geometry.k_pos, [geometry.q_pos, torch.zeros(1, 3).int(), torch.tensor([[2**31 - 1]])])
    return Rotation(at, base=1e4, dim=D - D % 2, layout=draw.choice(["half", "interleaved"]))


def tables(draw: random.Random, H: int, geometry: Geometry) -> DistanceTables:
    low, high = (0, 10) if geometry.q_pos.dim() != 2 or geometry.k_pos.dim() != 2 else geometry.delta_range
    if high - low > 10**6:
        low, high = 0, 10
    low, high = int(low), int(high)
    size = high - low + 1

    def table() -> Tensor | None:
        shape = sizes(draw, [H, size])
        return draw.choice([None, tensor(draw, shape, skewed(draw, torch.float32, [torch.float64, torch.int64]))])

    return DistanceTables(skewed(draw, low, [low + 1, low - 3, 2**40]), mul=table(), add=table(), value_mul=table())


def main(cases: int, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for number in range(cases):
        print(number, file=sys.stderr, flush=True)
        draw = random.Random(f"{seed} {number}")
        torch.manual_seed(number)
        try:
            arguments = case(draw)
        except (IndexError, RuntimeError):  # the pieces could not even be made
            continue
        try:
            impl = draw.choice(["auto", "auto", "cpu", "cpu", "sdpa", "reference"])
            with torch.inference_mode():
                out = attend(**arguments, impl=impl)
        except ValueError as error:
            assert str(error)  # noqa: PT017
            counts["refused"] += 1
            continue
        counts["equal to the reference" if equal(out, arguments) else "computed"] += 1
    print(json.dumps(counts))


def equal(out: Tensor, arguments: dict[str, Any]) -> bool:
    """Whether the reference could be asked, which then agrees."""
    if out.dtype is not torch.float32 or any(t.q.dtype is not torch.float32 for t in arguments["scores"]):
        return False
    try:
        wanted = attend(**arguments, impl="reference")
    except ValueError:
        return False
    half = any(isinstance(t.stream, Tensor) and t.stream.dtype is not torch.float32 for t in arguments["scores"])
    loose = 3e-2 if half or arguments["scale"] > 1 else 2e-4
    real = (arguments["geometry"].q_pos >= 0)[:, None, :, None].expand_as(out)  # what padding sees means nothing
    out, wanted = out[real], wanted[real]
    assert torch.allclose(out, wanted, atol=loose, rtol=loose, equal_nan=True), (out - wanted).abs().max()
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
