"""The contract over the product of the tables: variant x position scheme x check (kernels are looped over inside)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qvattn.positions import POSITIONS
from qvattn.variants import VARIANTS

from .contract import CHECKS
from .tiny import close, left_padded, step_by_step, tiny, tiny_spec, tokens


@pytest.mark.filterwarnings("ignore:slim. W_K has condition number:UserWarning")
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("check", CHECKS)
def test_contract(check: str, variant: str, position: str) -> None:
    CHECKS[check](tiny_spec(variant, position))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_splits_windows_and_padding_equal_solo_runs(data: st.DataObject) -> None:
    """Rows of any lengths, left-padded, in any chunks, with any window and any kernel choice: each as if alone."""
    variant, position = data.draw(st.sampled_from(list(VARIANTS))), data.draw(st.sampled_from(list(POSITIONS)))
    total = data.draw(st.integers(1, 22))
    lengths = [total, data.draw(st.integers(1, total))]
    splits = data.draw(st.lists(st.integers(1, total), max_size=6))
    splits = [*_prefix_within(splits, total - 1), 0]
    splits[-1] = total - sum(splits)
    layer = tiny(tiny_spec(variant, position, window=data.draw(st.none() | st.integers(1, total))))
    x = tokens(2, total)
    stepped = step_by_step(layer, x, splits, left_padded(lengths, total))
    for row, length in enumerate(lengths):
        with torch.no_grad():
            close(stepped[row, total - length :], layer(x[row : row + 1, total - length :])[0])


def _prefix_within(sizes: list[int], total: int) -> list[int]:
    kept: list[int] = []
    for size in sizes:
        if sum(kept) + size <= total:
            kept.append(size)
    return kept
