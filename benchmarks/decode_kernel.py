"""The native decode kernel alone: every instruction set this machine has, and the microseconds of Python around a call.

    python benchmarks/decode_kernel.py [--threads 1] [--seconds 0.5]

Nanoseconds per key and query head are of the library call itself, without Python; beside them the share of the read
bandwidth measured in turn. One line a case, so that two builds can be compared with `diff`.
"""

from __future__ import annotations

import argparse
import functools
import statistics

import torch

from qvattn.kernels import attend
from qvattn.kernels._native import native, why_missing
from qvattn.kernels.cpu import _request, attend_cpu
from qvattn.lab.bench_decode import DTYPES, Bench, alternate

CASES = ("mha", "qv", "qv+agf+pcm-v", "qv-ka", "gqa", "mla")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--seconds", type=float, default=0.5, help="for each instruction set and dtype")
    options.add_argument("--shape", type=int, nargs=4, default=[1, 8, 4096, 64], metavar=("B", "H", "T", "D"))
    chosen = options.parse_args()
    library = native()
    if library is None:
        raise SystemExit(why_missing())
    torch.set_num_threads(chosen.threads)
    B, H, T, D = chosen.shape
    print(
        f"{chosen.threads} thread(s), B={B} H={H} T={T} d={D}: ns per key and head (share of read bandwidth), medians"
    )
    for isa in library.isas:
        library.use_isa(isa)
        for name, dtype in DTYPES.items():
            bench = Bench(B, H, T, D, dtype)
            requests, calls, sizes = [], {}, {}
            for case in CASES:
                workload = bench.workload(case)
                if workload is None:
                    continue
                request = _request(*workload.call.args, workload.call.keywords["tables"])
                requests.append(request)  # keeps alive what the addresses point to
                calls[case] = functools.partial(library.decode, request[0].buffer_info()[0], 0.125, chosen.threads)
                sizes[case] = workload.bytes
            probe = torch.ones(max(sizes.values()), dtype=torch.uint8)
            calls["read"] = functools.partial(library.read, probe, chosen.threads)
            medians = {case: statistics.median(times) for case, times in alternate(calls, chosen.seconds).items()}
            read = probe.numel() / medians["read"]
            cells = [
                f"{case} {1e9 * medians[case] / (B * H * T):.2f} ({100 * sizes[case] / medians[case] / read:.0f} %)"
                for case in sizes
            ]
            print(f"{isa:9s} {name:5s} {'  '.join(cells)}", flush=True)
    overhead()


def overhead() -> None:
    """A step over 16 tokens: almost nothing but Python."""
    bench = Bench(1, 8, 16, 64, torch.float32)
    workload = bench.workload("qv")
    assert workload is not None
    scores, value, geometry = workload.call.args
    calls = {
        "attend": functools.partial(attend, scores, value, geometry, scale=0.125),
        "attend_cpu": functools.partial(attend_cpu, scores, value, geometry, scale=0.125),
    }
    for name, times in alternate(calls, 0.5).items():
        print(f"{name} over 16 tokens: {1e6 * statistics.median(times):.1f} us")


if __name__ == "__main__":
    main()
