"""RoPE: queries and scoring streams are turned by an angle that grows with the position (arXiv 2104.09864).

The dot product of two turned vectors depends on the distance alone. There is no table: variants rotate keys at write,
and streams that are values too on read, so that what is summed stays free of position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from .base import Position, Rotation


class RoPE(Position):
    """Rotary embedding.

    base: wavelengths are 2 pi base^(2i/width).  dim: how many elements turn, default all of the rotated width.
    layout: "half" or "interleaved", see `Rotation`.  proportional: see `Rotation`.
    frequencies, gain: scaled RoPE (Llama 3, YaRN, ...) as the numbers it comes to, see `Rotation`.
    """

    rotary = True
    options: ClassVar[Mapping[str, Any]] = {
        "base": 10_000.0,
        "dim": None,
        "layout": "half",
        "proportional": False,
        "frequencies": None,
        "gain": 1.0,
    }

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> str | None:
        if not options["base"] > 1:
            return f"position.base={options['base']}: allowed is base > 1, such as 10000"
        if options["dim"] is not None and options["dim"] % 2:
            return f"position.dim={options['dim']}: RoPE turns pairs; give an even number"
        if not options["gain"] > 0:
            return f"position.gain={options['gain']}: allowed is a positive factor"
        if options["frequencies"] is not None and options["proportional"]:
            return "position.frequencies: they say how fast every pair turns; leave position.proportional unset"
        if options["proportional"] and options["dim"] is None:
            return "position.proportional=True: means something for a part of the width only; set position.dim"
        return None

    def rotation(self, positions: Tensor) -> Rotation | None:
        return Rotation(positions, **self.options_in_use)
