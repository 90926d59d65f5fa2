"""Slim attention (arXiv 2503.05840): MHA that caches K alone, because V is a fixed linear map of all of K.

    V = x W^V = K (W^K)^-1 W^V = K M     (K: all heads side by side, W^K square)

The parameters are those of `mha`; M is computed from them in float64 and remembered. K is cached raw and rotated on
read. `expand` materialises V; `absorb` sums K flat over all heads and applies each head's part of M afterwards.

The inverse amplifies the rounding of the cached keys by up to the condition number of W^K: where condition times
machine epsilon of the dtype reaches WARN_AT a warning is given, at REFUSE_AT the layer is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels.terms import ScoreTerm, ValueTerm
from ..positions import Rotation
from ..streams import Stream
from .base import Streams, Terms, Variant
from .folding import Folded

if TYPE_CHECKING:
    from ..spec import AttentionSpec

WARN_AT = 1e-2
"""Worst relative error of V (condition of W^K times epsilon) from which a warning is given."""
REFUSE_AT = 1.0
"""Worst relative error of V from which the layer is refused."""


class Slim(Variant):
    """K only, exact for square MHA.

    A layer that borrows streams keeps its own k_proj and v_proj: they say how it makes values from borrowed keys.
    """

    also_called = "K-only cache of square MHA"
    stream_parameters: ClassVar[tuple[str, ...]] = ()
    two_routes = True

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        if spec.n_heads * spec.d_head != spec.d_model:
            return (
                f"d_head={spec.d_head}: W_K must be square to be inverted, n_heads * d_head = d_model = "
                f"{spec.d_model}; leave d_head unset or use mha"
            )
        if spec.bias:
            return "bias=True: the values are a linear map of the keys only without biases; use bias=False or mha"
        return None

    @classmethod
    def streams(cls, spec: AttentionSpec) -> tuple[Stream, ...]:
        return (Stream(name="k", heads=spec.n_heads, width=spec.d_head, scores=True, values=True),)

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.k_proj = self.linear(spec.d_model, spec.d_model)
        self.v_proj = self.linear(spec.d_model, spec.d_model)
        self._folded = Folded()

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        return {"k": self.heads(self.k_proj(x), self.n_heads)}

    def key_to_value(self) -> Tensor:
        """M (E, H * D): values of all heads from the keys of all heads.

        Raises UserError where W_K is too close to singular for the dtype.
        """
        return self._folded.recall((self.k_proj.weight, self.v_proj.weight), self._solve)

    def _solve(self) -> Tensor:
        w_k, w_v = self.k_proj.weight, self.v_proj.weight
        if not (torch.is_grad_enabled() or w_k.is_meta):
            check_condition(w_k)
        try:
            return torch.linalg.solve(w_k.double().mT, w_v.double().mT).to(w_k.dtype)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise UserError("slim: W_K is singular; use mha, or weights whose key projection is invertible") from None

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        v = self.heads(s["k"].transpose(1, 2).flatten(2) @ self.key_to_value(), self.n_heads)
        return Terms([ScoreTerm(q=q["q"], stream=s["k"], rotation=rotation)], ValueTerm(stream=v))

    def absorb(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        lift = self.key_to_value().unflatten(1, (self.n_heads, -1)).transpose(0, 1)
        return Terms(
            [ScoreTerm(q=q["q"], stream=s["k"], rotation=rotation)], ValueTerm(stream=s["k"], flat=True, lift=lift)
        )


def check_condition(w_k: Tensor) -> None:
    """Warn or refuse, by how much inverting W_K (E, E) amplifies the rounding of its dtype."""
    condition = float(torch.linalg.cond(w_k.double()))
    worst = condition * torch.finfo(w_k.dtype).eps
    message = (
        f"slim: W_K has condition number {condition:.3g}; in {w_k.dtype} values rebuilt from keys may be off by "
        f"{worst:.1g} of their size"
    )
    if not worst < REFUSE_AT:
        raise UserError(f"{message} (allowed is below {REFUSE_AT:g}); use a wider dtype or mha")
    if worst >= WARN_AT:
        warnings.warn(message, stacklevel=2)
