"""The largest entries of long rows, found in two stages: the best chunks first, then the best within them.

A row of logits is thousands long and only a few entries matter. The maxima of chunks are one fast pass; everything
after it is small. Exact: the k largest entries lie in the k chunks with the largest maxima.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
SHORTEST = 16 * CHUNK
"""Rows below this length are not worth two stages."""
FEWEST = 150_000
"""Entries below which one pass of `max` (three times as fast as `argmax`) is as fast as two stages."""


def largest(rows: Tensor) -> Tensor:
    """Index of the largest entry of each row (R, V) -> (R,), as argmax."""
    count = rows.shape[1] // CHUNK
    if rows.shape[1] < SHORTEST or rows.numel() < FEWEST:
        return rows.max(dim=1).indices
    body = rows[:, : count * CHUNK].unflatten(1, (count, CHUNK))
    peaks = body.amax(dim=2)
    chunk = peaks.argmax(dim=1)
    every = torch.arange(rows.shape[0], device=rows.device)
    best = chunk * CHUNK + body[every, chunk].argmax(dim=1)
    tail = rows[:, count * CHUNK :]
    if tail.shape[1]:
        peak, index = tail.max(dim=1)
        best = torch.where(peak > peaks[every, chunk], index + count * CHUNK, best)
    return best


def largest_sums(rows: Tensor, plus: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of rows[b * K + j, v] + plus[b, j] for each b, in falling order.

    rows: (B * K, V).  plus: (B, K).  Returns the sums, their j and their v, each (B, k).
    """
    (B, K), V = plus.shape, rows.shape[1]
    count = V // CHUNK
    if V < SHORTEST or k > count:
        sums, index = (rows.view(B, K, V) + plus[:, :, None]).flatten(1).topk(min(k, K * V), dim=1)
        return sums, index // V, index % V
    body = rows[:, : count * CHUNK].unflatten(1, (count, CHUNK))
    peaks = body.amax(dim=2).view(B, K, count) + plus[:, :, None]
    chunks = peaks.flatten(1).topk(k, dim=1, sorted=False).indices
    owner, chunk = chunks // count, chunks % count
    first = torch.arange(B, device=rows.device)[:, None] * K
    found = body[first + owner, chunk] + plus.gather(1, owner)[:, :, None]
    columns = chunk[:, :, None] * CHUNK + torch.arange(CHUNK, device=rows.device)
    owners = owner[:, :, None].expand_as(columns)
    tail = rows[:, count * CHUNK :].view(B, K, -1) + plus[:, :, None]
    places = torch.arange(count * CHUNK, V, device=rows.device).expand_as(tail)
    beams = torch.arange(K, device=rows.device)[None, :, None].expand_as(tail)
    sums, among = torch.cat((found.flatten(1), tail.flatten(1)), dim=1).topk(k, dim=1)
    every_owner = torch.cat((owners.flatten(1), beams.flatten(1)), dim=1)
    every_column = torch.cat((columns.flatten(1), places.flatten(1)), dim=1)
    return sums, every_owner.gather(1, among), every_column.gather(1, among)
