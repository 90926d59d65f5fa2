"""Tiny tests on one thread, reproducible."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody has written with NaN: to read it shows
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
