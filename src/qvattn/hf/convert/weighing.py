"""How much an error of each key and value counts: token by token, and direction by direction.

A small error e of the keys of token n changes the loss by e^T F_n e / 2, where F_n = E[g g^T] is the Fisher information
of that key and g the gradient of the model's own negative log likelihood at labels drawn from the model (so that no
text's labels enter). F_n is approximated by a product of a weight per token and one matrix for all tokens, as in
K-FAC (arXiv 1503.05671). One backward pass a window measures both; no weight is ever changed by a gradient.

Without it ("activations") all directions count alike, and all tokens but the first of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...models import CausalLM
from ...variants.separate_keys import MHA
from .maps import Maps
from .perplexity import Progress

FIRST_TOKEN = 100.0
"""Weight of a window's first token where sensitivities are not measured.

Models read the first token of a text as a place to look at when there is nothing to look at: much of all attention
goes there, so an error of its key shifts every softmax, while plain least squares counts it as one token of many.
"""
HEAVIEST = 200.0
"""No token weighs more than this many average ones."""
BEGINNING = 4
"""Tokens at the beginning of a window that are left out of the matrix for all tokens: they are unlike all others."""
FLOOR = 1e-3
"""Of the largest eigenvalue; smaller ones are raised to it before the matrix is inverted for the weights."""


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """Of one layer: weights (N, T) per token with mean about 1, the metric of its keys, and of keys and values."""

    tokens: Tensor
    key_metric: Tensor
    metric: Tensor


def by_activations(model: CausalLM, windows: Tensor) -> list[Weighing]:
    """All directions alike; keys and values count by their own scale."""
    weights = torch.ones(windows.shape)
    weights[:, 0] = FIRST_TOKEN
    found = []
    for variant in _layers(model):
        maps = Maps.of(variant)
        k, v = (1 / float(one.square().mean()) for one in (maps.k, maps.v))
        n, m = maps.k.shape[1], maps.v.shape[1]
        scales = torch.cat((torch.full((n,), k), torch.full((m,), v))).double()
        found.append(Weighing(tokens=weights, key_metric=torch.eye(n).double(), metric=scales.diag()))
    return found


def by_sensitivity(model: CausalLM, windows: Tensor, *, seed: int, progress: Progress) -> list[Weighing]:
    """Measured by one backward pass a window (N, T) with labels drawn from the model.

    Holds the gradients of keys and values of all layers and windows: N x T x their elements x 4 bytes a layer.
    """
    layers = _layers(model)
    widths = [(layer.k_proj.out_features, layer.v_proj.out_features) for layer in layers]
    gradients = [torch.empty(*windows.shape, sum(both)) for both in widths]
    generator = torch.Generator().manual_seed(seed)
    wanted = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    try:
        for i, window in enumerate(windows):
            for kept, found in zip(gradients, _gradients(model, layers, window, generator), strict=True):
                kept[i] = found
            progress("weighing errors", i + 1, len(windows))
    finally:
        for p, flag in zip(model.parameters(), wanted, strict=True):
            p.requires_grad_(flag)
    return [_weighing(g, both[0]) for g, both in zip(gradients, widths, strict=True)]


def _gradients(model: CausalLM, layers: Sequence[MHA], window: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Per layer the gradient at its keys and values, (T, n + m)."""
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, _: object, output: Tensor) -> Tensor:
        kept = output if output.requires_grad else output.detach().requires_grad_()
        kept.retain_grad()
        outputs[module] = kept
        return kept

    watched = [one for layer in layers for one in (layer.k_proj, layer.v_proj)]
    hooks = [one.register_forward_hook(keep) for one in watched]
    try:
        with torch.enable_grad():
            ids = window[None]
            positions = torch.arange(len(window), dtype=torch.int32)[None]
            hidden = model.hidden(ids, positions)
            _own_loss(hidden[0], model.output_weight, generator).backward()
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for layer in layers:
        k, v = (outputs[one].grad for one in (layer.k_proj, layer.v_proj))
        assert k is not None and v is not None
        both = torch.cat((k[0], v[0]), dim=-1).float()
        if not torch.isfinite(both).all():
            raise UserError("the model's gradients are not finite for the calibration text (NaN or infinity)")
        found.append(both)
    return found


def _own_loss(hidden: Tensor, output: Tensor, generator: torch.Generator) -> Tensor:
    """Cross-entropy of labels drawn from the model itself; hidden (T, E), output (V, E)."""
    logits = (hidden @ output.mT).float()
    # the largest of logits + Gumbel noise is a draw from the softmax
    noise = torch.rand(logits.shape, generator=generator).clamp_min_(1e-20).log_().neg_().log_()
    labels = (logits.detach() - noise).argmax(dim=-1)
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def _weighing(g: Tensor, keys: int) -> Weighing:
    """g: (N, T, n + m) gradients at keys (n elements) and values."""
    rest = g[:, min(BEGINNING, g.shape[1] // 2) :].flatten(0, 1)
    metric = (rest.T @ rest).double()
    metric /= metric.diagonal().mean().clamp_min(1e-30)
    key_metric = metric[:keys, :keys]
    values, vectors = torch.linalg.eigh(key_metric)
    values = values.clamp_min(values[-1].clamp_min(1e-30) * FLOOR)
    inverse = (vectors / values @ vectors.T).to(g.dtype)
    k = g[..., :keys]
    weights = ((k @ inverse) * k).sum(-1)
    weights = weights / weights[:, min(BEGINNING, g.shape[1] // 2) :].mean().clamp_min(1e-30)
    return Weighing(tokens=weights.clamp_max(HEAVIEST), key_metric=key_metric, metric=metric)


def _layers(model: CausalLM) -> list[MHA]:
    found = []
    for block in model.decoder_stack.blocks():
        assert isinstance(block.self_attn.variant, MHA)
        found.append(block.self_attn.variant)
    return found
