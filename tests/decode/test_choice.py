"""Two-stage selection finds what argmax and topk find."""

from __future__ import annotations

import pytest
import torch

from qvattn.decode import choice
from qvattn.decode.choice import SHORTEST, largest, largest_sums

WIDTHS = [5, SHORTEST - 1, SHORTEST, SHORTEST + 1, SHORTEST + 77, 2500]


@pytest.fixture(params=[0, choice.FEWEST])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "FEWEST", request.param)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("width", WIDTHS)
def test_largest_is_argmax(width: int) -> None:
    rows = torch.randn(50, width)
    rows[:5, -1] = 100
    rows[5:10, 0] = 100
    rows[10] = float("-inf")
    rows[10, -2] = 1
    assert torch.equal(largest(rows), rows.argmax(dim=1))


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_of_equals_wins(width: int) -> None:
    assert torch.equal(largest(torch.zeros(3, width)), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("sources", "beams", "k"), [(1, 1, 2), (3, 4, 8), (2, 5, 10), (1, 3, 30)])
def test_largest_sums_are_those_of_topk(width: int, sources: int, beams: int, k: int) -> None:
    rows, plus = torch.randn(sources * beams, width), torch.randn(sources, beams)
    rows[:, -1] = 3  # the tail takes part
    plus[:, 1:] -= 1
    sums, owner, column = largest_sums(rows, plus, k)
    every = (rows.view(sources, beams, width) + plus[:, :, None]).flatten(1)
    expected, index = every.topk(min(k, every.shape[1]), dim=1)
    assert torch.equal(sums, expected)
    assert torch.equal(owner * width + column, index)
