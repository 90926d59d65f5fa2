"""K = V with norms, as in the global layers of Gemma 4 (`attention_k_eq_v`).

    V = RMSNorm(x W^V), without a gain;   K = rope(gain_k * V);   q = rope(gain_q * RMSNorm(x W^Q))

One stream: the normed V, as it is summed. Gain and rotation are applied on read. (Gemma 4 does not scale the score;
ours is scaled by 1/sqrt(D) like every other, so its query gain is Gemma's times sqrt(D).)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.terms import ScoreTerm, ValueTerm
from ..positions import Rotation, rotate
from .base import Streams, Terms
from .value_only import QVGQA

if TYPE_CHECKING:
    from ..spec import AttentionSpec

NORM_EPSILON = 1e-6


class KEqV(QVGQA):
    """Groups of query heads share one normed value head; its key is that value with a gain."""

    also_called = "K = V, Gemma 4 global layers"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.q_gain = nn.Parameter(torch.ones(spec.d_head))
        self.k_gain = nn.Parameter(torch.ones(spec.d_head))

    def reset_parameters(self) -> None:
        """Gains start at one, as in any norm."""
        nn.init.ones_(self.q_gain)
        nn.init.ones_(self.k_gain)

    def queries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        q = self.heads(self.q_proj(x), self.n_heads)
        return {"q": rotate(F.rms_norm(q, q.shape[-1:], self.q_gain, NORM_EPSILON), rotation)}

    def entries(self, x: Tensor, rotation: Rotation | None) -> dict[str, Tensor]:
        v = self.heads(self.v_proj(x), self.v_heads)
        return {"v": F.rms_norm(v, v.shape[-1:], eps=NORM_EPSILON)}

    def expand(self, q: Mapping[str, Tensor], s: Streams, rotation: Rotation | None) -> Terms:
        groups = self.spec.groups_of(self.v_heads)
        value = ValueTerm(stream=s["v"], groups=groups)
        if rotation is None:  # nothing stands between gain and dot product: it moves to the query
            return Terms([ScoreTerm(q=q["q"] * self.k_gain, stream=s["v"], groups=groups)], value)
        score = ScoreTerm(q=q["q"], stream=s["v"], groups=groups, gain=self.k_gain, rotation=rotation)
        return Terms([score], value)
