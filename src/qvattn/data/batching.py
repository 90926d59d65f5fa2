"""Which examples stand in which batch, as a function of (seed, epoch) and nothing else.

Everything that compares variants leans on this: the plan sees lengths only, draws from its own generator,
and keeps no state, so two runs, or one run resumed, meet the same batches in the same order on any number of
processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError

Ints = npt.NDArray[np.int64]


class BatchPlan:
    """Batches bounded by padded tokens, bucketed by length, in shuffled order.

    lengths: `(N, 2)` (source, target) tokens of each pair, or `(N,)` tokens of each example.
    max_tokens: bounds, for each side, rows x longest row of that side.
    seed: with the epoch, the only thing that decides the order.
    Raises `UserError` if there is no example or one alone exceeds `max_tokens`.
    """

    def __init__(self, lengths: npt.ArrayLike, max_tokens: int, seed: int) -> None:
        table = np.asarray(lengths, dtype=np.int64)
        self.lengths: Ints = table[:, None] if table.ndim == 1 else table
        self.max_tokens = max_tokens
        self.seed = seed
        self._last: tuple[int, list[list[int]]] | None = None
        if self.lengths.ndim != 2 or not len(self.lengths):
            raise UserError(f"a batch plan needs lengths of shape (N, 2) or (N,) with N > 0, got {table.shape}")
        if seed < 0:
            raise UserError(f"seed={seed}: it must be 0 or more")
        longest = self.lengths.max(axis=1)
        if longest.max() > max_tokens:
            worst = int(longest.argmax())
            sides = " and ".join(str(int(length)) for length in self.lengths[worst])
            raise UserError(
                f"max_tokens={max_tokens}: example {worst} alone has {sides} tokens; "
                f"raise max_tokens to {int(longest.max())} or lower max_length"
            )

    def __len__(self) -> int:
        """Number of examples (the number of batches may differ by a few between epochs)."""
        return len(self.lengths)

    def epoch(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, each a list of example indices; every example occurs exactly once."""
        if self._last is None or self._last[0] != epoch:
            self._last = (epoch, self._plan(epoch))
        return [list(batch) for batch in self._last[1]]

    def batches(self, epoch: int = 0, batch: int = 0) -> Iterator[tuple[int, int, list[int]]]:
        """Endless `(epoch, batch, indices)` from a position on; to resume, pass the one that comes next."""
        if epoch < 0 or batch < 0:
            raise UserError(f"epoch={epoch}, batch={batch}: both must be 0 or more")
        while True:
            plan = self.epoch(epoch)
            for index in range(batch, len(plan)):
                yield epoch, index, plan[index]
            epoch, batch = epoch + 1, 0

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two plans give the same batches; store it to notice changed data on resume."""
        digest = hashlib.sha256(repr((self.lengths.shape, self.max_tokens, self.seed)).encode())
        digest.update(np.ascontiguousarray(self.lengths).tobytes())
        return digest.hexdigest()[:16]

    def _plan(self, epoch: int) -> list[list[int]]:
        draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        # Lengths blurred by a token or two, ties broken at random: neighbours change from epoch to epoch,
        # padding hardly grows. Keys are uniform draws: of a generator's methods the least likely to change
        # between versions.
        keys: list[npt.NDArray[Any]] = [draw.random(len(self.lengths))]
        for side in range(self.lengths.shape[1]):
            blur = 2 if side == self.lengths.shape[1] - 1 else 3
            keys.append(self.lengths[:, side] + (draw.random(len(self.lengths)) * blur).astype(np.int64))
        batches = self._cut(np.lexsort(keys))
        order = np.argsort(draw.random(len(batches)), kind="stable")
        return [batches[i] for i in order]

    def _cut(self, order: npt.NDArray[np.intp]) -> list[list[int]]:
        batches: list[list[int]] = []
        batch: list[int] = []
        longest = 0
        for index, length in zip(order.tolist(), self.lengths.max(axis=1)[order].tolist(), strict=True):
            # rows x the longest of either side is the larger of the two padded sizes
            if batch and (len(batch) + 1) * max(longest, length) > self.max_tokens:
                batches.append(batch)
                batch, longest = [], 0
            batch.append(index)
            longest = max(longest, length)
        batches.append(batch)
        return batches


def shard(indices: Sequence[int], rank: int, world_size: int) -> list[int]:
    """The part of one global batch that process `rank` of `world_size` computes; may be empty.

    Parts are disjoint and cover the batch. Sum the losses, and divide by the token count of all parts.
    """
    if not 0 <= rank < world_size:
        raise UserError(f"rank={rank}: it must be from 0 to world_size - 1 = {world_size - 1}")
    return list(indices[rank::world_size])
