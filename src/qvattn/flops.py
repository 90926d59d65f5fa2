"""Floating-point operations of decoding one token, counted on the operations themselves, not by formulas.

The variant runs on the meta device (shapes without numbers) under PyTorch's counter, which counts products of matrices
(a multiply-add is 2). Whatever grows with the context is attention, the rest is projection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode

from .geometry import Geometry
from .kernels import attend
from .positions import POSITIONS

if TYPE_CHECKING:
    from .spec import AttentionSpec


def decode_flops(spec: AttentionSpec, context: int) -> int:
    """Operations of one layer for one new token over `context` cached tokens, on the cheapest exact route."""
    with torch.no_grad(), torch.device("meta"):
        variant = spec.variant_class(spec)
        position = POSITIONS[spec.position.kind](spec.n_heads, spec.causal, spec.position.options)
        streams = {s.name: torch.empty(1, s.heads, context, s.width) for s in spec.streams}
        now, past = position.rotation(torch.zeros(1, 1)), position.rotation(torch.zeros(1, context))
        x = torch.empty(1, 1, spec.d_model)
        route = variant.absorb if variant.absorbs(spec) else variant.expand

        def step() -> None:
            variant.entries(x, now)
            terms = route(variant.queries(x, now), streams, past)
            o = attend(terms.scores, terms.value, _seeing_all(context), scale=variant.scale, impl="reference")
            variant.output(o)

        step()  # products of parameters that decoding remembers are made here, and not counted
        with FlopCounterMode(display=False) as counter:
            step()
    return int(counter.get_total_flops())


def _seeing_all(context: int) -> Geometry:
    """One query that sees every key. On the CPU: it decides on numbers, which the meta device has none of."""
    q_pos = torch.full((1, 1), max(context - 1, 0), dtype=torch.int32, device="cpu")
    k_pos = torch.arange(context, dtype=torch.int32, device="cpu")[None]
    return Geometry(q_pos, k_pos, causal=True)
