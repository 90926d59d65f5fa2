"""Keyless attention: a depth-3 factorisation of the bilinear form (arXiv 2606.21848).

    score_h = (x_q W^Q_h) F_h . V_h,  V_h = x W^V_h;   value = V_h

F_h (D x D) routes queries into value space and takes the place of the key projection. It stands on the query's side,
before any rotation, so for inference it is folded into the query projection: decoding costs what `qv` costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..positions import Rotation, rotate
from .folding import Folded, per_head
from .value_only import QV

if TYPE_CHECKING:
    from ..spec import AttentionSpec


class Keyless(QV):
    """One value head per query head; queries pass a factor of their own before they meet it."""

    also_called = "depth-3 factorisation, value-space routing"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.query_to_value = nn.Parameter(torch.empty(spec.n_heads, spec.d_head, spec.d_head))
        self._folded = Folded()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity: training starts as `qv`."""
        with torch.no_grad():
            self.query_to_value.copy_(torch.eye(self.spec.d_head))

    def queries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            q = per_head(self.heads(self.q_proj(x), self.n_heads), self.query_to_value)
        else:
            q = self.heads(F.linear(x, self._fold()), self.n_heads)
            if self.q_proj.bias is not None:
                q = q + (self.q_proj.bias.view(self.n_heads, 1, -1) @ self.query_to_value)
        return {"q": rotate(q, rotation)}

    def _fold(self) -> Tensor:
        """W^Q F, as the weight (H * D, E) of one projection."""
        weight, factor = self.q_proj.weight, self.query_to_value

        def make() -> Tensor:
            return (factor.mT @ weight.unflatten(0, (self.n_heads, -1))).flatten(0, 1)

        return self._folded.recall((weight, factor), make)
