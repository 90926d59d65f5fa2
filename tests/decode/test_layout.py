"""Large matrices keep the numbers of `F.linear` in whichever layout the number of rows calls for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qvattn.decode.lean import LARGE, SEVERAL, Joined, Linear

WIDE, NARROW = 2048, LARGE // 2048


@pytest.mark.parametrize("bias", [False, True])
def test_every_layout_gives_the_same_numbers(bias: bool) -> None:
    weight, b = torch.randn(WIDE, NARROW) / NARROW**0.5, torch.randn(WIDE) if bias else None
    linear = Linear(weight, b)
    for rows in (1, SEVERAL, 2 * SEVERAL, 1, SEVERAL):
        linear.lay_out(rows)
        assert (linear._packed is not None) == (rows >= SEVERAL and torch.backends.mkldnn.is_available())
        assert (linear._dense is None) == (linear._packed is not None)
        assert torch.equal(linear.weight, weight)
        for shape in ((1, 1, NARROW), (rows, 1, NARROW), (rows, NARROW), (3, 50, NARROW)):
            x = torch.randn(shape)
            torch.testing.assert_close(linear(x), F.linear(x, weight, b), atol=1e-4, rtol=1e-4)
        strided = torch.randn(rows, 3, NARROW)[:, -1]
        torch.testing.assert_close(linear(strided), F.linear(strided, weight, b), atol=1e-4, rtol=1e-4)


def test_small_matrices_and_other_dtypes_stay_dense() -> None:
    for weight in (torch.randn(NARROW, NARROW), torch.randn(WIDE, NARROW, dtype=torch.float64)):
        linear = Linear(weight, None)
        linear.lay_out(64)
        assert linear._packed is None


def test_joined_maps_are_laid_out_together() -> None:
    weights = [torch.randn(WIDE // 2, NARROW) / NARROW**0.5 for _ in range(2)]
    joined = Joined([Linear(w, None) for w in weights])
    joined.linear.lay_out(8)
    x = torch.randn(8, 1, NARROW)
    for i, weight in enumerate(weights):
        torch.testing.assert_close(joined.part(i)(x), F.linear(x, weight), atol=1e-4, rtol=1e-4)
        assert torch.equal(joined.part(i).weight, weight)
