"""The soak of the decode engine, short; `benchmarks/reliability.py` runs it with 10,000 requests."""

from __future__ import annotations

import torch

from faults.record import REQUESTS, SECONDS, count

from .engine import soak

FLAT = 512
"""Bytes a request: 10,000 requests may then add 5 MB, which is less than one of their larger caches leaves behind."""


def test_soak() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        report = soak(REQUESTS, compare_every=10 if REQUESTS >= 1000 else 4, most_seconds=SECONDS)
    finally:
        torch.set_num_threads(threads)
    served = sum(report.requests.values())
    assert served == REQUESTS or report.seconds > SECONDS
    assert report.compared > served / 20
    if served >= 2000:  # in fewer requests the allocator is still finding its size
        assert abs(report.slope()) < FLAT, report.slope()
    for kind, number in report.requests.items():
        count("soak: requests", kind, number)
    count("soak: rows equal to a solo run", "equal", report.compared)
    count("soak: tokens", "decoded", report.tokens)
    count("soak: seconds", "taken", round(report.seconds))
    if report.resident:
        sizes = [size for _, size in report.resident]
        count("soak: resident memory, KiB", "at half of the requests", sizes[len(sizes) // 2] >> 10)
        count("soak: resident memory, KiB", "at the end", sizes[-1] >> 10)
        count("soak: growth, bytes a request (second half, least squares)", "measured", round(report.slope()))
