"""The toy corpus of the training tests, and a process that forks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from train.conftest import _one_thread, corpus_files, toy, toy_file

from .processes import Forker

if TYPE_CHECKING:
    __all__ = ["_one_thread", "corpus_files", "toy", "toy_file"]


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    made = Forker()
    yield made
    made.close()
