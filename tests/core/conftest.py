"""Tiny tests on one thread, reproducible."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import flex_attention


@pytest.fixture(autouse=True)
def _one_thread_and_seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # the contract asks for hundreds of shapes, and FlexAttention would trace each anew; test_kernels.py traces it
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    yield
    torch.set_num_threads(threads)
