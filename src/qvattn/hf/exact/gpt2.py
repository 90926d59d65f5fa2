"""GPT-2: square MHA with biases and without rotation, its three projections in one Conv1D, through the slim form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.gpt2 import modeling_gpt2 as gpt2

from .slim import Affine, SlimAttention


class LeanGPT2Attention(SlimAttention, gpt2.GPT2Attention):
    def lean_refusal(self, tolerance: float) -> str | None:
        if type(self.c_attn) is not gpt2.Conv1D:
            return f"c_attn is a {type(self.c_attn).__name__}: its weight is folded, which takes a plain Conv1D"
        return super().lean_refusal(tolerance)

    def lean_keeps(self) -> str | None:
        return "cross-attention" if self.is_cross_attention else None

    @property
    def lean_dropout(self) -> float:
        return float(self.attn_dropout.p) if self.training else 0.0

    def lean_heads(self) -> tuple[int, int]:
        return self.num_heads, self.head_dim

    def _lean_part(self, i: int) -> Affine:
        """Projection i of (q, k, v)."""
        part = slice(i * self.embed_dim, (i + 1) * self.embed_dim)
        return self.c_attn.weight[:, part], self.c_attn.bias[part]

    def lean_keys(self) -> Affine:
        return self._lean_part(1)

    def lean_values(self) -> Affine:
        return self._lean_part(2)

    def lean_parameters(self) -> list[Tensor]:
        return list(self.c_attn.parameters())

    def lean_project(
        self, x: Tensor, kwargs: Mapping[str, Any], fresh: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        q, k, v = (self._lean_split(part) for part in self.c_attn(x).split(self.split_size, dim=2))
        return {"q": q}, {"k": k}, v if fresh else None

    def lean_project_out(self, o: Tensor) -> Tensor:
        y: Tensor = self.resid_dropout(self.c_proj(o))
        return y
