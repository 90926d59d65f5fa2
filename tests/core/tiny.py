"""Tiny attention layers with parameters that are nowhere special: no identities, no ones, no zeros."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from qvattn import Attention, AttentionSpec, StreamCache

D_MODEL, HEADS = 16, 4


def tiny_spec(variant: str, position: str = "none", **fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"variant": variant, "d_model": D_MODEL, "n_heads": HEADS, "position": position} | fields)


def scramble(module: nn.Module, seed: int = 0) -> None:
    """Give every parameter distinct values. Square matrices become well conditioned (`slim` inverts one)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            generator.manual_seed(seed + zlib.crc32(name.encode()))
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            if p.dim() == 2 and p.shape[0] == p.shape[1]:
                rotation, _ = torch.linalg.qr(noise)
                p.copy_(rotation + 0.1 * noise)
            elif p.dim() >= 2:
                p.copy_(noise * p.shape[-1] ** -0.5)
            else:
                p.copy_(1 + 0.3 * noise)


def tiny(spec: AttentionSpec, *, seed: int = 0, **kwargs: Any) -> Attention:
    layer = Attention(spec, **kwargs)
    scramble(layer, seed)
    return layer.eval()


def tokens(batch: int, length: int, seed: int = 1, width: int = D_MODEL) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def step_by_step(
    layer: Attention, x: Tensor, splits: list[int], positions: Tensor | None = None, cache: StreamCache | None = None
) -> Tensor:
    """x (B, T, E) through a cache, `splits` tokens at a time."""
    cache = layer.new_cache(x.shape[0], capacity=2) if cache is None else cache
    parts, start = [], 0
    with torch.no_grad():
        for size in splits:
            piece = slice(start, start + size)
            parts.append(layer(x[:, piece], cache=cache, positions=None if positions is None else positions[:, piece]))
            start += size
    assert start == x.shape[1]
    return torch.cat(parts, dim=1)


def left_padded(lengths: list[int], total: int) -> Tensor:
    """Positions (B, total): each row's tokens at the right end, -1 before them."""
    return torch.stack([torch.arange(total) - (total - n) for n in lengths]).clamp(min=-1).int()


def right_padded(lengths: list[int], total: int) -> Tensor:
    """Positions (B, total): each row's tokens at the left end, -1 after them."""
    rows = torch.arange(total).repeat(len(lengths), 1)
    return rows.masked_fill(rows >= torch.tensor(lengths)[:, None], -1).int()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
