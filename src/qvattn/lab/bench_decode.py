"""Times the attention of one decoded token over caches of several kinds, against PyTorch's own attention.

Everything is measured in one process, one call of each case in turn, so that whatever else the machine does meets all
of them alike. Ratios are of medians. Must never report a bandwidth that was not measured here.
"""

from __future__ import annotations

import functools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..geometry import Geometry
from ..kernels._native import native, why_missing
from ..kernels.api import attend
from ..kernels.terms import ScoreTerm, ValueTerm
from ..positions.base import DistanceTables
from ..quantised import QuantisedStream

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
SHAPES = ((1, 8, 8192, 64), (1, 16, 32768, 64), (8, 16, 4096, 64), (32, 16, 2048, 64), (1, 32, 8192, 128))
GQA_GROUP = 8
CASES = ("sdpa", "sdpa-kv", "sdpa-gqa", "mha", "gqa", "qv", "qv+agf+pcm-v", "qv-ka", "mla")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured row. bytes: what must be read at least once; times are in seconds."""

    case: str
    dtype: str
    shape: tuple[int, int, int, int]
    bytes: int
    median: float
    best: float
    samples: int
    read_bandwidth: float
    to_sdpa: float | None = None
    to_mha: float | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes a second at the median."""
        return self.bytes / self.median

    @property
    def share(self) -> float:
        """Of the measured read bandwidth."""
        return self.bandwidth / self.read_bandwidth

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"bandwidth": self.bandwidth, "share": self.share}


@dataclass(frozen=True)
class Workload:
    """A case ready to run: `call` once, reading `bytes`."""

    call: Callable[[], Any]
    bytes: int


def random_stream(B: int, G: int, T: int, W: int, dtype: torch.dtype) -> Tensor | QuantisedStream:
    """A stream (B, G, T, W) of normal deviates, repeated from a small block: only its size matters here."""
    block = torch.randn(min(T, 256), W)
    if dtype is not torch.int8:
        return block.to(dtype).repeat(-(-T // block.shape[0]), 1)[:T].expand(B, G, T, W).contiguous()
    scale = block.abs().amax(dim=-1) / 127
    data = (block / scale[:, None]).round().to(torch.int8)
    tall = -(-T // block.shape[0])
    return QuantisedStream(
        data.repeat(tall, 1)[:T].expand(B, G, T, W).contiguous(), scale.repeat(tall)[:T].expand(B, G, T).contiguous()
    )


def stream_bytes(stream: Tensor | QuantisedStream) -> int:
    if isinstance(stream, QuantisedStream):
        return stream_bytes(stream.data) + stream_bytes(stream.scale)
    return stream.numel() * stream.element_size()


def agf_tables(H: int, T: int) -> DistanceTables:
    """AGF + PCM-V over distances 0 .. T - 1: one power law that multiplies scores and values."""
    exponents = torch.logspace(-1.3, 0, H)[:, None]
    c = (1 + torch.arange(T, dtype=torch.float32)) ** -exponents
    return DistanceTables(0, mul=c, value_mul=c)


class Bench:
    """The workloads of one shape (B, H, T, D) and cache dtype; `workload(case)` makes them, or None where undefined."""

    def __init__(self, B: int, H: int, T: int, D: int, dtype: torch.dtype) -> None:
        self.B, self.H, self.T, self.D, self.dtype = B, H, T, D, dtype
        self.half = dtype if dtype is not torch.int8 else torch.float32
        self.q = torch.randn(B, H, 1, D).to(self.half)
        self.geometry = Geometry(
            torch.full((1, 1), T - 1, dtype=torch.int32), torch.arange(T, dtype=torch.int32)[None], causal=True
        )
        self._streams: dict[tuple[str, int, int], Any] = {}

    def stream(self, name: str, heads: int, width: int) -> Any:
        key = (name, heads, width)
        if key not in self._streams:
            self._streams[key] = random_stream(self.B, heads, self.T, width, self.dtype)
        return self._streams[key]

    def ours(self, scores: Sequence[ScoreTerm], value: ValueTerm, tables: DistanceTables | None = None) -> Workload:
        size = sum(stream_bytes(s) for s in {id(s): s for s in (value.stream, *(t.stream for t in scores))}.values())
        call = functools.partial(attend, scores, value, self.geometry, scale=0.125, tables=tables, impl="cpu")
        return Workload(call, size)

    def workload(self, case: str) -> Workload | None:
        B, H, D = self.B, self.H, self.D
        if case.startswith("sdpa"):
            return self.sdpa(case)
        if case == "mha":
            return self.ours(
                [ScoreTerm(q=self.q, stream=self.stream("k", H, D))], ValueTerm(stream=self.stream("v", H, D))
            )
        if case == "gqa":
            if H % GQA_GROUP:
                return None
            k, v = (self.stream(n, H // GQA_GROUP, D) for n in "kv")
            return self.ours([ScoreTerm(q=self.q, stream=k)], ValueTerm(stream=v))
        if case == "mla":
            rank, rope = 512, 64
            latent, k_rope = self.stream("latent", 1, rank), self.stream("rope", 1, rope)
            q, q_rope = (torch.randn(B, H, 1, w).to(self.half) for w in (rank, rope))
            return self.ours(
                [ScoreTerm(q=q, stream=latent), ScoreTerm(q=q_rope, stream=k_rope)], ValueTerm(stream=latent)
            )
        v = self.stream("v", H, D)
        scores, value = [ScoreTerm(q=self.q, stream=v)], ValueTerm(stream=v)
        if case == "qv":
            return self.ours(scores, value)
        if case == "qv+agf+pcm-v":
            return self.ours(scores, value, agf_tables(H, self.T))
        if case == "qv-ka":
            context = ScoreTerm(q=torch.randn(B, H, 1, 2 * D).to(self.half), stream=self.stream("g", 1, 2 * D))
            return self.ours([*scores, context], value)
        raise UserError(f"case {case!r}: allowed are {', '.join(CASES)}")

    def sdpa(self, case: str) -> Workload | None:
        """PyTorch's attention over K and V ("sdpa"), with K as V ("sdpa-kv"), with shared heads ("sdpa-gqa")."""
        if self.dtype is torch.int8 or (case == "sdpa-gqa" and self.H % GQA_GROUP):
            return None
        G = self.H // GQA_GROUP if case == "sdpa-gqa" else self.H
        k = self.stream("v" if case == "sdpa-kv" else "k", G, self.D)
        v = self.stream("v", G, self.D)
        call = functools.partial(
            F.scaled_dot_product_attention, self.q, k, v, scale=0.125, enable_gqa=case == "sdpa-gqa"
        )
        return Workload(call, stream_bytes(k) if k is v else stream_bytes(k) + stream_bytes(v))


def measure(cases: Sequence[str], dtype: str, shape: tuple[int, int, int, int], *, seconds: float = 2.0) -> list[Case]:
    """Times the cases of one shape and dtype in turn, for about `seconds` in all but at least five rounds.

    Raises UserError where the native kernel is missing.
    """
    library = native()
    if library is None:
        raise UserError(f"bench decode: {why_missing()}")
    bench = Bench(*shape, DTYPES[dtype])
    workloads = {case: w for case in cases if (w := bench.workload(case)) is not None}
    probe = torch.empty(max((w.bytes for w in workloads.values()), default=1 << 20), dtype=torch.uint8).fill_(1)
    calls: dict[str, Callable[[], Any]] = {"read": lambda: library.read(probe, torch.get_num_threads())}
    calls |= {case: w.call for case, w in workloads.items()}
    times = alternate(calls, seconds)
    medians = {case: statistics.median(t) for case, t in times.items()}
    bandwidth = probe.numel() / medians["read"]
    ours = {"gqa": "sdpa-gqa"}
    return [
        Case(
            case=case,
            dtype=dtype,
            shape=shape,
            bytes=w.bytes,
            median=medians[case],
            best=min(times[case]),
            samples=len(times[case]),
            read_bandwidth=bandwidth,
            to_sdpa=_ratio(medians, ours.get(case, "sdpa"), case),
            to_mha=_ratio(medians, "mha", case),
        )
        for case, w in workloads.items()
    ]


def alternate(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Seconds of every call, made in turn, after one unmeasured round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for call in calls.values():
            call()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return times


def _ratio(medians: dict[str, float], other: str, case: str) -> float | None:
    """How many times faster `case` is than `other`."""
    return medians[other] / medians[case] if other in medians and other != case else None


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    library = native()
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "isa": None if library is None else library.isa,
        "openmp": None if library is None else library.has_openmp,
    }
