"""Invented runs of the lab's tests and the toy corpus of the training tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from train.conftest import _one_thread, corpus_files, toy, toy_file

sys.path.insert(0, str(Path(__file__).parent.parent / "lab"))

if TYPE_CHECKING:
    __all__ = ["_one_thread", "corpus_files", "toy", "toy_file"]
