"""Square MHA through the slim form (arXiv 2503.05840): K alone is cached, V is a fixed map of all of K.

    K = x W_K + b_K,  V = x W_V + b_V = K M + c,   M = W_K^-1 W_V,   c = b_V - b_K M

K is cached raw and rotated on read where the model has RoPE. Attention weights sum to 1, so c is added once to the
sum. M and c are computed in float64 and remembered; the first call of an empty cache uses the true values.
The inverse amplifies the rounding of the cached K by up to the condition number of W_K: `lean` refuses by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...kernels import ScoreTerm, ValueTerm
from ...positions import Rotation
from ...streams import Stream
from ...variants.base import Streams, Terms
from ...variants.folding import Folded
from .core import LeanAttention

Affine = tuple[Tensor, Tensor | None]
"""A weight (E in, E out) and a bias (E,) or None: x -> x @ weight + bias."""


class SlimAttention(LeanAttention):
    """What the square MHA models share. A subclass says where its projections are."""

    def lean_heads(self) -> tuple[int, int]:
        """Query heads and their size."""
        raise NotImplementedError

    def lean_keys(self) -> Affine:
        raise NotImplementedError

    def lean_values(self) -> Affine:
        raise NotImplementedError

    def lean_parameters(self) -> list[Tensor]:
        """The parameters that keys and values are made of."""
        raise NotImplementedError

    # ---- what is kept ---------------------------------------------------------------------------

    def lean_refusal(self, tolerance: float) -> str | None:
        weight, _ = self.lean_keys()
        if weight.shape[0] != weight.shape[1] or weight.shape != self.lean_values()[0].shape:
            return f"W_K is {tuple(weight.shape)}: only square MHA has values that are a map of its keys"
        condition = float(torch.linalg.cond(weight.detach().double()))
        worst = condition * torch.finfo(weight.dtype).eps
        if not worst <= tolerance:
            return (
                f"W_K has condition number {condition:.3g}; in {weight.dtype} values rebuilt from keys may be off by "
                f"{worst:.1g} of their size, tolerance={tolerance:g} (a wider dtype or a larger tolerance admits it)"
            )
        return None

    def lean_streams(self) -> tuple[Stream, ...]:
        heads, width = self.lean_heads()
        return (Stream(name="k", heads=heads, width=width, scores=True, values=True),)

    def lean_elements_before(self) -> int:
        return self.lean_keys()[0].shape[1] + self.lean_values()[0].shape[1]

    def lean_applied(self) -> str:
        return "slim: K only" + (", rotated on read" if self.lean_rotates_on_read else "")

    def lean_folded(self) -> int:
        width = self.lean_keys()[0].shape[0]
        return width * width + width

    def lean_key_to_value(self) -> tuple[Tensor, Tensor]:
        """M as (H, E, D) and c as (H, D), in the dtype of the weights."""
        folded = self.__dict__.setdefault("lean_folded_product", Folded())
        both = folded.recall(self.lean_parameters(), self._lean_solve)
        heads, _ = self.lean_heads()
        return both[:, :-1], both[:, -1].view(heads, -1)

    def _lean_solve(self) -> Tensor:
        """[M; c] as (H, E + 1, D)."""
        (w_k, b_k), (w_v, b_v) = self.lean_keys(), self.lean_values()
        m = torch.linalg.solve(w_k.double(), w_v.double())
        c = torch.zeros_like(m[0]) if b_v is None else b_v.double()
        if b_k is not None:
            c = c - b_k.double() @ m
        heads, width = self.lean_heads()
        return torch.cat((m, c[None])).unflatten(1, (heads, width)).transpose(0, 1).contiguous().to(w_k.dtype)

    # ---- the call -------------------------------------------------------------------------------

    def lean_terms(
        self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None, values: Tensor | None, absorb: bool
    ) -> Terms:
        score = ScoreTerm(q=q["q"], stream=s["k"], rotation=rotation)
        if values is not None:
            return Terms([score], ValueTerm(stream=values))
        m, _ = self.lean_key_to_value()
        if absorb:
            return Terms([score], ValueTerm(stream=s["k"], flat=True, lift=m))
        flat = s["k"].transpose(1, 2).flatten(2)
        return Terms(
            [score], ValueTerm(stream=(flat @ m.transpose(0, 1).flatten(1)).unflatten(-1, m.shape[::2]).transpose(1, 2))
        )

    def lean_output(self, o: Tensor, values_given: bool) -> Tensor:
        if not values_given:
            o = o + self.lean_key_to_value()[1][:, None]
        return self.lean_project_out(o.transpose(1, 2).flatten(2))

    def lean_project_out(self, o: Tensor) -> Tensor:
        raise NotImplementedError

    def _lean_split(self, x: Tensor) -> Tensor:
        """(B, M, E) -> (B, H, M, D)."""
        return x.unflatten(-1, self.lean_heads()).transpose(1, 2)


def transposed(linear: Any) -> Affine:
    """The map of an nn.Linear."""
    return linear.weight.mT, linear.bias
