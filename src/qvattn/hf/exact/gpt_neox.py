"""GPT-NeoX (Pythia): square MHA with biases and partial RoPE, the three projections of each head side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.gpt_neox import modeling_gpt_neox as neox

from .core import not_plain
from .slim import Affine, SlimAttention


class LeanGPTNeoXAttention(SlimAttention, neox.GPTNeoXAttention):
    lean_cache_argument = "layer_past"
    lean_rotates_on_read = True

    def lean_refusal(self, tolerance: float) -> str | None:
        return not_plain(self, "query_key_value") or super().lean_refusal(tolerance)

    def lean_heads(self) -> tuple[int, int]:
        return self.config.num_attention_heads, self.head_size

    def _lean_part(self, i: int) -> Affine:
        """Projection i of (q, k, v), gathered from all heads."""
        shape = (self.config.num_attention_heads, 3, self.head_size)
        bias = self.query_key_value.bias
        weight = self.query_key_value.weight.unflatten(0, shape)[:, i].flatten(0, 1).mT
        return weight, None if bias is None else bias.unflatten(0, shape)[:, i].flatten()

    def lean_keys(self) -> Affine:
        return self._lean_part(1)

    def lean_values(self) -> Affine:
        return self._lean_part(2)

    def lean_parameters(self) -> list[Tensor]:
        return list(self.query_key_value.parameters())

    def lean_turns(self) -> int:
        return int(self.rotary_ndims)

    def lean_project(
        self, x: Tensor, kwargs: Mapping[str, Any], fresh: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        shape = (self.config.num_attention_heads, 3 * self.head_size)
        q, k, v = self.query_key_value(x).unflatten(-1, shape).transpose(1, 2).chunk(3, dim=-1)
        q, _ = neox.apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
        return {"q": q}, {"k": k}, v if fresh else None

    def lean_project_out(self, o: Tensor) -> Tensor:
        y: Tensor = self.dense(o)
        return y
