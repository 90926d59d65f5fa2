"""The kernels' arguments: whatever shapes, strides and types they get, a right result or ValueError, never a crash.

In a process of its own with bounded memory, since a mistake would be a segmentation fault or a giant allocation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from faults.record import EXAMPLES, count

SCRIPT = Path(__file__).with_name("kernel_cases.py")


def test_arguments_of_the_kernels() -> None:
    command = [sys.executable, str(SCRIPT), str(20 * EXAMPLES), "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment)
    assert done.returncode == 0, f"exit {done.returncode}, case {done.stderr[-3000:]}"
    counts = json.loads(done.stdout)
    assert counts["refused"] > EXAMPLES
    assert counts["equal to the reference"] > EXAMPLES
    for outcome, number in counts.items():
        count("fuzzed: arguments of the kernels", outcome, number)
