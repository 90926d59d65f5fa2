"""The native kernel in each instruction set this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qvattn.kernels._native import Native, native, why_missing

ISAS = ("portable", "avx2", "avx512")


@pytest.fixture
def library() -> Iterator[Native]:
    """The library; what a test changes about it is undone."""
    found = native()
    if found is None:
        pytest.skip(why_missing() or "no native kernel")
    before, threads = found.isa, torch.get_num_threads()
    yield found
    found.use_isa(before)
    torch.set_num_threads(threads)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, library: Native) -> str:
    """Each instruction set in turn, in use."""
    if request.param not in library.isas:
        pytest.skip(f"this machine or build has no {request.param}")
    library.use_isa(request.param)
    return str(request.param)
