"""The kernel's loops under AddressSanitizer and UndefinedBehaviorSanitizer: no read outside a stream, no overflow."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def test_random_requests_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    driver = tmp_path / "sanitized"
    build = subprocess.run([compiler, *FLAGS, HERE / "sanitized.cpp", "-o", driver], capture_output=True, text=True)
    if build.returncode and "sanitize" in build.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert build.returncode == 0, build.stderr
    run = subprocess.run([driver, "1", "100"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
