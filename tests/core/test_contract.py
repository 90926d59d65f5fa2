"""The contract over the product of the tables: variant x position scheme x check (kernels are looped over inside)."""

from __future__ import annotations

import pytest

from qvattn.positions import POSITIONS
from qvattn.variants import VARIANTS

from .contract import CHECKS
from .tiny import tiny_spec


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("check", CHECKS)
def test_contract(check: str, variant: str, position: str) -> None:
    CHECKS[check](tiny_spec(variant, position))
