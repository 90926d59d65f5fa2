"""What bounds the decode kernel: its time beside bare reading of the same bytes and beside its arithmetic alone.

    python benchmarks/decode_profile.py [--dtypes fp32 bf16 int8] [--rounds 3] [--seconds 2] [--json FILE]

For every shape, all in one process, one call of each in turn:

    kernel      the library call over the whole cache, without Python around it
    read        one pass over the very bytes that the kernel reads, nothing computed, as many threads
    arithmetic  the same call over a cache that stays in one core's L2 (1 MiB), per key, one thread, over the threads
    SDPA        PyTorch's attention over K and V

A kernel that overlaps perfectly takes the larger of `read` and `arithmetic`. `limit` is SDPA's time over the time to
read the kernel's bytes: no kernel that reads its cache once can be faster than that, whatever it computes.
Rounds allocate anew (other pages); the figures are medians of the rounds' medians, with the range of the share.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qvattn.kernels._native import native, why_missing
from qvattn.kernels.cpu import _request
from qvattn.lab.bench_decode import DTYPES, SHAPES, Bench, Workload, alternate, machine

CASES = ("mha", "qv", "qv+agf+pcm-v", "qv-ka", "gqa")
IN_L2 = 1 << 20
"""Bytes of cache that stay in one core's L2."""
Shape = tuple[int, int, int, int]


class Kernel:
    """The library call of one case, ready to be made again and again."""

    def __init__(self, bench: Bench, case: str, threads: int) -> None:
        workload = bench.workload(case)
        assert workload is not None
        self.workload: Workload = workload
        library = native()
        assert library is not None
        self._request = _request(*workload.call.args, workload.call.keywords["tables"])
        address = self._request[0].buffer_info()[0]
        self.call = functools.partial(library.decode, address, 0.125, threads)


def arithmetic(case: str, shape: Shape, dtype: torch.dtype) -> Callable[[float], float]:
    """A function of the seconds to spend: seconds per key of one thread, for a cache of one sequence in L2."""
    _, H, _, D = shape
    one = Bench(1, H, 64, D, dtype).workload(case)
    assert one is not None
    T = max(64, IN_L2 * 64 // one.bytes)
    kernel = Kernel(Bench(1, H, T, D, dtype), case, 1)
    return lambda seconds: statistics.median(alternate({"": kernel.call}, seconds)[""]) / T


def measure(case: str, shape: Shape, dtype: torch.dtype, seconds: float) -> dict[str, float]:
    """Seconds of one round."""
    library, threads = native(), torch.get_num_threads()
    assert library is not None
    bench = Bench(*shape, dtype)
    kernel = Kernel(bench, case, threads)
    probe = torch.ones(kernel.workload.bytes, dtype=torch.uint8)
    calls: dict[str, Callable[[], Any]] = {
        "kernel": kernel.call,
        "read": functools.partial(library.read, probe, threads),
    }
    sdpa = bench.workload("sdpa-gqa" if case == "gqa" else "sdpa")
    if sdpa is not None:
        calls["sdpa"] = sdpa.call
    medians = {name: statistics.median(times) for name, times in alternate(calls, seconds).items()}
    keys = shape[0] * shape[2]
    return medians | {"arithmetic": arithmetic(case, shape, dtype)(seconds / 4) * keys / threads}


def profile(case: str, shape: Shape, dtype: str, rounds: int, seconds: float) -> dict[str, Any]:
    """A row of the table; times in milliseconds."""
    found = [measure(case, shape, DTYPES[dtype], seconds) for _ in range(rounds)]
    row: dict[str, Any] = {"shape": shape, "dtype": dtype, "case": case}
    row |= {f"{name}_ms": 1e3 * statistics.median(f[name] for f in found) for name in found[0]}
    shares = [f["read"] / f["kernel"] for f in found]
    row |= {"share": statistics.median(shares), "lowest_share": min(shares), "highest_share": max(shares)}
    row["over_bound"] = statistics.median(f["kernel"] / max(f["read"], f["arithmetic"]) for f in found)
    if "sdpa" in found[0]:
        row["to_sdpa"] = statistics.median(f["sdpa"] / f["kernel"] for f in found)
        row["limit"] = statistics.median(f["sdpa"] / f["read"] for f in found)
    return row


TITLE = "B, H, T, d         cache case            kernel     read    arith  share %          / bound  x SDPA   limit"


def line(row: dict[str, Any]) -> str:
    shape = ", ".join(map(str, row["shape"]))
    times = " ".join(f"{row[name]:8.3f}" for name in ("kernel_ms", "read_ms", "arithmetic_ms"))
    share, low, high = (f"{100 * row[name]:.0f}" for name in ("share", "lowest_share", "highest_share"))
    sdpa = f"{row['to_sdpa']:8.2f} {row['limit']:7.2f}" if "limit" in row else ""
    return (
        f"{shape:18s} {row['dtype']:5s} {row['case']:13s} {times} "
        f"{share:>5s} ({low:>3s}-{high:>3s}) {row['over_bound']:10.2f} {sdpa}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16", "int8"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES[:3]))
    parser.add_argument("--shape", type=int, nargs=4, action="append", metavar=("B", "H", "T", "D"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case and round")
    parser.add_argument("--json", type=Path, help="write the table there too")
    chosen = parser.parse_args()
    if native() is None:
        raise SystemExit(why_missing())
    print(machine(), TITLE, sep="\n")
    rows = []
    for shape in chosen.shape or SHAPES:
        for dtype in chosen.dtypes:
            for case in chosen.cases:
                rows.append(profile(case, tuple(shape), dtype, chosen.rounds, chosen.seconds))
                print(line(rows[-1]), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
