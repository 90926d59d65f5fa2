"""Products of parameters that inference may keep: made once, made again when a parameter has changed.

Never used where gradients are recorded: there a product is part of the graph and is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Folded:
    """One remembered product."""

    def __init__(self) -> None:
        self._key: Any = None
        self._value: Tensor = torch.empty(0)

    def recall(self, parameters: Sequence[Tensor], make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives for the parameters as they are now.

        Writes through `Tensor.data` escape PyTorch's version counter and are not noticed.
        """
        if torch.is_grad_enabled():
            return make()
        versions = [None if p.is_inference() else p._version for p in parameters]
        key = [(p.data_ptr(), v, p.dtype, p.device) for p, v in zip(parameters, versions, strict=True)]
        if self._key != key:
            self._key, self._value = key, make()
        return self._value
