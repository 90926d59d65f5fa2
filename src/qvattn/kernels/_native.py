"""Finds and loads the compiled decode kernel (csrc/, a plain C library). Must never build
anything, nor raise at import.

Where no compiler was at hand the package installs without it; `why_missing` then says so.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from pathlib import Path

import torch

from ..errors import UserError

FILE_NAME = "_native_cpu.so"
LAYOUT_VERSION = 1
"""Of the requests that `cpu.py` writes; must equal the one csrc/decode.cpp reads."""
ISA_VARIABLE = "QVATTN_ISA"
"""Environment variable that forces an instruction set by name, for tests and measurements."""


class Native:
    """The loaded library: `decode(request, scale, threads)` and `read(address, bytes, threads)`."""

    def __init__(self, path: Path) -> None:
        # torch is imported above, so that both use the one OpenMP runtime (and pool of threads) that torch brings
        lib = ctypes.CDLL(str(path))
        lib.qvattn_layout_version.restype = ctypes.c_int64
        if lib.qvattn_layout_version() != LAYOUT_VERSION:
            raise OSError(f"{path} was built from another version of qvattn; install it again")
        lib.qvattn_isa_name.restype = ctypes.c_char_p
        lib.qvattn_isa_name.argtypes = lib.qvattn_isa_works.argtypes = [ctypes.c_int64]
        lib.qvattn_isa_works.restype = lib.qvattn_has_openmp.restype = lib.qvattn_decode.restype = ctypes.c_int64
        lib.qvattn_decode.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_int64, ctypes.c_int64]
        lib.qvattn_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
        lib.qvattn_read.restype = ctypes.c_double
        self.path, self._lib = path, lib
        self.has_openmp = bool(lib.qvattn_has_openmp())
        names: list[str] = []
        while (name := lib.qvattn_isa_name(len(names))) is not None:
            names.append(name.decode())
        self._isas = {name: i for i, name in enumerate(names) if lib.qvattn_isa_works(i)}
        self.use_isa(os.environ.get(ISA_VARIABLE) or None)

    @property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets that this library and this machine share, best last."""
        return tuple(self._isas)

    def use_isa(self, name: str | None) -> None:
        """Use instruction set `name` from now on; None: the best one."""
        if name is not None and name not in self._isas:
            raise UserError(f"{ISA_VARIABLE}={name!r}: allowed here are {', '.join(self._isas)}")
        self.isa = name or self.isas[-1]
        self._isa = self._isas[self.isa]

    def decode(self, request: int, scale: float, threads: int) -> None:
        """Serve the request at this address, see `cpu.py`."""
        failure = self._lib.qvattn_decode(request, scale, self._isa, threads)
        if failure:
            raise MemoryError("the decode kernel ran out of memory")

    def read(self, data: torch.Tensor, threads: int) -> float:
        """Read all of `data` once, for measuring the machine's read bandwidth."""
        size = data.numel() * data.element_size()
        return float(self._lib.qvattn_read(data.data_ptr(), size, self._isa, threads))


def _candidates() -> list[Path]:
    here = Path(__file__).resolve().parent
    # an editable install keeps compiled files in site-packages and Python files in the source tree
    return [here / FILE_NAME, Path(sysconfig.get_path("platlib")) / "qvattn" / "kernels" / FILE_NAME]


@functools.cache
def _load() -> Native | str:
    for path in _candidates():
        if path.exists():
            try:
                return Native(path)
            except OSError as error:
                return f"the native kernel cannot be loaded: {error}"
    return "the native kernel is not installed (no C++17 compiler was found when qvattn was installed)"


def native() -> Native | None:
    """The library, or None where it is missing. Raises UserError for an unknown QVATTN_ISA."""
    found = _load()
    return found if isinstance(found, Native) else None


@torch.compiler.assume_constant_result
def why_missing() -> str | None:
    """Why there is no native kernel here, or None."""
    found = _load()
    return found if isinstance(found, str) else None
