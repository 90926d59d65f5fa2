"""environment.json: what a result depends on besides the recipe — versions, commit, device, threads, seed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("qvattn", "torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy", "pydantic")


def describe_environment(*, device: torch.device, processes: int, precision: str, seed: int) -> dict[str, object]:
    """Facts about this process and machine, in JSON's types."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model(),
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": processes,
        "precision": precision,
        "seed": seed,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout this package runs from (`+changes` when tracked files differ), None when installed."""
    here = Path(__file__).resolve().parent
    try:
        tracked = _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        commit = _git(here, "rev-parse", "HEAD")
        changes = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return (commit + ("+changes" if changes else "")) if tracked and commit else None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
