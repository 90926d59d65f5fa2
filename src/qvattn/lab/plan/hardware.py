"""Named hardware: a small table that anybody can edit (`lab/hardware.yaml`), and quantities with units.

Numbers are the makers' peaks, dense (without sparsity); the planner never measures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from ...untrusted import parse_yaml

TABLE = Path(__file__).resolve().parent.parent / "hardware.yaml"
UNITS = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "p": 1e15,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
_QUANTITY = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgtp]?i?)(?:b|flops|flop)?(?:/s)?")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device: bytes of memory (None: not said), bytes a second, operations a second by type of the weights."""

    name: str
    memory: float | None
    bandwidth: float
    flops: dict[str, float]
    source: str

    def peak(self, dtype: torch.dtype) -> float:
        """Operations a second: 32-bit weights compute in fp32, all others in 16 bit (8-bit weights are widened)."""
        wanted = "fp32" if dtype.itemsize >= 4 else "bf16"
        if wanted not in self.flops:
            raise UserError(f"hardware {self.name}: no {wanted} operations a second in the table; give --flops")
        return self.flops[wanted]


def quantity(text: str, what: str) -> float:
    """A positive number with an optional unit: "80GB", "24GiB", "3.35TB/s", "989TFLOPS", "1e12"."""
    match = _QUANTITY.fullmatch(text.strip().lower())
    try:
        value = float(match[1]) * UNITS[match[2]] if match else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not value > 0:
        raise UserError(
            f"{what}={text!r}: give a positive number with a unit, such as 80GB, 24GiB, 3.35TB/s, 989TFLOPS"
        )
    return value


def table(path: Path = TABLE) -> dict[str, Hardware]:
    """All entries of a table, by name. Raises UserError naming the entry and field that does not fit."""
    try:
        entries = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"hardware table {path}: {error}") from None
    if not isinstance(entries, dict):
        raise UserError(f"hardware table {path}: expected a mapping from names to entries")
    return {str(name): _entry(str(name), fields, path) for name, fields in entries.items()}


def _entry(name: str, fields: Any, path: Path) -> Hardware:
    known = {"memory", "bandwidth", "flops", "source"}
    if not isinstance(fields, dict) or fields.keys() != known or not isinstance(fields["flops"], dict):
        raise UserError(
            f"hardware table {path}: {name}: expected memory, bandwidth, flops (a mapping: bf16, fp32) and source"
        )
    return Hardware(
        name=name,
        memory=quantity(str(fields["memory"]), f"{name}.memory"),
        bandwidth=quantity(str(fields["bandwidth"]), f"{name}.bandwidth"),
        flops={str(k): quantity(str(v), f"{name}.flops.{k}") for k, v in fields["flops"].items()},
        source=str(fields["source"]),
    )


def choose(
    names: list[str],
    *,
    path: Path = TABLE,
    memory: float | None = None,
    bandwidth: float | None = None,
    flops: float | None = None,
) -> list[Hardware]:
    """Entries of the table by name, with fields replaced where given; without a name, the given fields alone."""
    if not names:
        if bandwidth is None or flops is None:
            raise UserError("without --hardware give both --bandwidth and --flops (and --memory for the budget)")
        peaks = {"bf16": flops, "fp32": flops}
        return [Hardware(name="given", memory=memory, bandwidth=bandwidth, flops=peaks, source="options")]
    known = table(path)
    missing = [name for name in names if name not in known]
    if missing:
        raise UserError(f"hardware {missing[0]!r}: the table has {', '.join(known)}; or give --bandwidth and --flops")
    changed = any(v is not None for v in (memory, bandwidth, flops))
    return [
        Hardware(
            name=f"{one.name} (changed)" if changed else one.name,
            memory=memory or one.memory,
            bandwidth=bandwidth or one.bandwidth,
            flops={"bf16": flops, "fp32": flops} if flops else one.flops,
            source=one.source,
        )
        for one in (known[name] for name in names)
    ]
