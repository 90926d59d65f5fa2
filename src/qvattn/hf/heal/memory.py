"""Memory that a training process frees is kept for its next step."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Tell glibc's allocator not to give large blocks back to the system, for this whole process.

    A step frees and asks again for gigabytes, and every page that comes back from the system must be cleared first:
    measured on SmolLM2-135M, one thread, bf16: 241 tokens/s without this, 263 with it. Elsewhere it does nothing.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
