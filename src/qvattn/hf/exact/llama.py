"""Llama with as many key heads as query heads (Llama-1 and 2 up to 13B): slim, keys rotated on read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.llama import modeling_llama as llama

from .core import not_plain
from .slim import Affine, SlimAttention, transposed


class LeanLlamaAttention(SlimAttention, llama.LlamaAttention):
    lean_rotates_on_read = True

    def lean_refusal(self, tolerance: float) -> str | None:
        if self.num_key_value_groups != 1:
            heads = self.config.num_attention_heads, self.config.num_key_value_heads
            return (
                f"{heads[0]} query heads share {heads[1]} key heads: only square MHA has values that its keys determine"
            )
        return not_plain(self, "k_proj", "v_proj") or super().lean_refusal(tolerance)

    def lean_heads(self) -> tuple[int, int]:
        return self.config.num_attention_heads, self.head_dim

    def lean_keys(self) -> Affine:
        return transposed(self.k_proj)

    def lean_values(self) -> Affine:
        return transposed(self.v_proj)

    def lean_parameters(self) -> list[Tensor]:
        return [*self.k_proj.parameters(), *self.v_proj.parameters()]

    def lean_turns(self) -> int:
        return int(self.head_dim)

    def lean_project(
        self, x: Tensor, kwargs: Mapping[str, Any], fresh: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        q, k = (self._lean_split(p(x)) for p in (self.q_proj, self.k_proj))
        q, _ = llama.apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
        return {"q": q}, {"k": k}, self._lean_split(self.v_proj(x)) if fresh else None

    def lean_project_out(self, o: Tensor) -> Tensor:
        y: Tensor = self.o_proj(o)
        return y
