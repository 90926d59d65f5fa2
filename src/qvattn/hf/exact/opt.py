"""OPT: square MHA with biases and without rotation, through the slim form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.opt import modeling_opt as opt

from .core import not_plain
from .slim import Affine, SlimAttention, transposed


class LeanOPTAttention(SlimAttention, opt.OPTAttention):
    def lean_refusal(self, tolerance: float) -> str | None:
        return not_plain(self, "k_proj", "v_proj") or super().lean_refusal(tolerance)

    @property
    def lean_dropout(self) -> float:
        return float(self.dropout) if self.training else 0.0

    def lean_heads(self) -> tuple[int, int]:
        return self.num_heads, self.head_dim

    def lean_keys(self) -> Affine:
        return transposed(self.k_proj)

    def lean_values(self) -> Affine:
        return transposed(self.v_proj)

    def lean_parameters(self) -> list[Tensor]:
        return [*self.k_proj.parameters(), *self.v_proj.parameters()]

    def lean_project(
        self, x: Tensor, kwargs: Mapping[str, Any], fresh: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        q, k = (self._lean_split(p(x)) for p in (self.q_proj, self.k_proj))
        return {"q": q}, {"k": k}, self._lean_split(self.v_proj(x)) if fresh else None

    def lean_project_out(self, o: Tensor) -> Tensor:
        y: Tensor = self.out_proj(o)
        return y
