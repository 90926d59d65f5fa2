"""AGF: a power-law coefficient over distance that multiplies the score; with PCM-V it multiplies the values too.

    c_h(delta) = floor + (1 - floor) (1 + |delta| / tau)^(-p_h),   p_h = softplus(.) >= 0,   c_h(0) = 1

The place of the coefficient is from "QV May Be Enough" (arXiv 2603.15665); its parametrisation is ours (DESIGN 2.3).
In bidirectional attention each direction has its own exponents, so that an encoder can tell left from right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Position, wide_dtype


def inverse_softplus(y: Tensor) -> Tensor:
    return y + torch.log(-torch.expm1(-y))


class AGF(Position):
    """Power-law score factor. Options: see `options`.

    flattest, steepest: exponents of the first and last head at initialisation, geometric in between.
    tau: distance at which the decay sets in; learn_tau: train it per head.  learn: train the exponents.
    floor: the coefficient's limit at infinite distance, 0 <= floor < 1.  two_sided: own exponents per direction.
    """

    options: ClassVar[Mapping[str, Any]] = {
        "flattest": 0.05,
        "steepest": 1.0,
        "tau": 1.0,
        "learn_tau": False,
        "learn": True,
        "floor": 0.0,
        "two_sided": True,
    }
    on_values: ClassVar[bool] = False
    raw_exponent: Tensor
    raw_tau: Tensor

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> str | None:
        if options["tau"] <= 0:
            return f"position.tau={options['tau']}: allowed are positive distances"
        if not 0 <= options["floor"] < 1:
            return f"position.floor={options['floor']}: allowed is 0 <= floor < 1"
        if not 0 < options["flattest"] <= options["steepest"]:
            return f"position.flattest={options['flattest']}: allowed is 0 < flattest <= steepest"
        return None

    def __init__(self, n_heads: int, causal: bool, options: Mapping[str, Any]) -> None:
        super().__init__(n_heads, causal, options)
        self.start = dict(options)
        sides = 1 if causal or not options["two_sided"] else 2
        self._own("raw_exponent", torch.empty(sides, n_heads), options["learn"])
        self._own("raw_tau", torch.empty(n_heads), options["learn_tau"])
        self.floor = float(options["floor"])
        self.reset_parameters()

    def _own(self, name: str, value: Tensor, learned: bool) -> None:
        if learned:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def reset_parameters(self) -> None:
        """Exponents from flattest to steepest over the heads, tau as given."""
        flattest, steepest = self.start["flattest"], self.start["steepest"]
        spread = torch.linspace(0, 1, self.n_heads) if self.n_heads > 1 else torch.zeros(1)
        exponents = flattest * (steepest / flattest) ** spread
        with torch.no_grad():
            self.raw_exponent.copy_(inverse_softplus(exponents))
            self.raw_tau.copy_(inverse_softplus(torch.tensor(float(self.start["tau"]))))

    @property
    def exponents(self) -> Tensor:
        """p_h, (1 or 2, H): for past keys, and for future keys where directions differ."""
        return F.softplus(self.raw_exponent.to(wide_dtype(self.raw_exponent.dtype)))

    def coefficient(self, delta: Tensor) -> Tensor:
        """c_h(delta), (H, N)."""
        # a tiny floor keeps tau off zero, where the coefficient at distance 0 would be 0/0
        tau = F.softplus(self.raw_tau.to(wide_dtype(self.raw_tau.dtype)))[:, None] + 1e-6
        decay = torch.log1p(delta.abs().to(tau.dtype) / tau)
        p = self.exponents[:, :, None]
        exponent = p[0] if p.shape[0] == 1 else torch.where(delta >= 0, p[0], p[1])
        return self.floor + (1 - self.floor) * torch.exp(-exponent * decay)

    def compute(self, delta: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        c = self.coefficient(delta)
        return c, None, c if self.on_values else None


class AGFWithPCMV(AGF):
    """AGF whose coefficient also multiplies the values after the softmax (PCM-V)."""

    on_values = True
