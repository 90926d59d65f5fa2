"""A lean twin of a module tree: the same code over the same parameters, laid out and reached for single steps.

At one token a step much of the time goes to reaching parameters through `nn.Module` and to reading weight matrices in
the wrong order. The twin of a module is an instance of the same class whose children and parameters are plain
attributes; its linear maps hold their weight input-major, which a thin matrix product reads up to twice as fast.
Must never change a number beyond rounding, nor the module it was made from. A twin shows the weights of the moment it
was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M_ = TypeVar("M_", bound=nn.Module)


LARGE = 2**20
"""Elements from which a matrix does not stay in a core's cache between steps, so that its layout in memory decides."""
SEVERAL = 4
"""Rows from which oneDNN's own layout of a large matrix is read faster than any dense one (by a third at 8 rows)."""


class Linear:
    """x (..., I) -> (..., O). The weight (O, I) is kept input-major, or laid out by `lay_out`; the bias as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._dense: Tensor | None = weight.detach().mT.contiguous().mT
        self._packed: Tensor | None = None
        self.bias = None if bias is None else bias.detach()

    @property
    def weight(self) -> Tensor:
        """(O, I)."""
        if self._dense is not None:
            return self._dense
        assert self._packed is not None
        return self._packed.to_dense()

    def lay_out(self, rows: int) -> None:
        """Keep the weight as products with this many rows read it fastest. Never two copies of it."""
        weight = self._dense
        if weight is None:
            if rows < SEVERAL:
                self._dense, self._packed = self.weight.mT.contiguous().mT, None
        elif rows >= SEVERAL and weight.numel() >= LARGE and _can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
            self._dense = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._dense is not None:
            return F.linear(x, self._dense, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


def _can_pack(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()


class Joined:
    """Several linear maps of one input as one product: the first to be called makes all, the others find theirs."""

    def __init__(self, maps: Sequence[Linear]) -> None:
        biases = [m.weight.new_zeros(m.weight.shape[0]) if m.bias is None else m.bias for m in maps]
        bias = torch.cat(biases) if any(m.bias is not None for m in maps) else None
        self.linear = Linear(torch.cat([m.weight for m in maps]), bias)
        self.widths = [m.weight.shape[0] for m in maps]
        self._input: Tensor | None = None
        self._results: tuple[Tensor, ...] = ()

    def part(self, index: int) -> Part:
        """The map number `index`."""
        return Part(self, index)

    def result(self, x: Tensor, index: int) -> Tensor:
        if x is not self._input:
            self._input, self._results = x, torch.split_with_sizes(self.linear(x), self.widths, -1)
        return self._results[index]


class Part:
    """One of the maps that were joined; takes the place of a `Linear`."""

    def __init__(self, joined: Joined, index: int) -> None:
        self._joined, self._index = joined, index
        start, width = sum(joined.widths[:index]), joined.widths[index]
        self._place = slice(start, start + width)
        self.bias = None if joined.linear.bias is None else joined.linear.bias[self._place]

    @property
    def weight(self) -> Tensor:
        """(O, I)."""
        return self._joined.linear.weight[self._place]

    def __call__(self, x: Tensor) -> Tensor:
        return self._joined.result(x, self._index)


def lean(module: M_) -> M_:
    """The lean twin of `module`, in evaluation mode. Hooks are not taken over."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for name, child in module._modules.items():
        twin.__dict__[name] = None if child is None else lean_child(child)
    for name, value in (*module._parameters.items(), *module._buffers.items()):
        twin.__dict__[name] = value
    twin.training = False
    return twin


def lean_child(module: nn.Module) -> Any:
    """What stands in for a child: a plain callable for the usual maps and norms, otherwise its lean twin."""
    kind = type(module)
    if kind is nn.Linear:
        return Linear(module.weight, module.bias)  # type: ignore[arg-type]
    if kind is nn.ModuleList:
        return [lean_child(m) for m in module.children()]
    if kind is nn.Identity:
        return _same
    if kind is nn.LayerNorm:
        return _layer_norm(module)  # type: ignore[arg-type]
    if kind is nn.RMSNorm:
        return _rms_norm(module)  # type: ignore[arg-type]
    return lean(module)


def _same(x: Tensor) -> Tensor:
    return x


def _layer_norm(m: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    shape, weight, bias, eps = m.normalized_shape, m.weight, m.bias, m.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps, False)


def _rms_norm(m: nn.RMSNorm) -> Callable[[Tensor], Tensor]:
    shape, weight, eps = m.normalized_shape, m.weight, m.eps
    return lambda x: torch.rms_norm(x, shape, weight, eps)


def join_maps_of_input(twin: Any, apply: Callable[[Tensor], Any], width: int) -> list[Linear]:
    """Join those linear maps of the lean `twin` that `apply(x)` applies to x itself. x: (1, 1, width).

    Returns the maps that are left.
    """
    maps = {name: value for name, value in twin.__dict__.items() if isinstance(value, Linear)}
    if not maps:
        return []
    some = next(iter(maps.values())).weight
    x = some.new_zeros(1, 1, width)
    met: list[str] = []
    for name, value in maps.items():
        twin.__dict__[name] = _Listening(name, value, x, met)
    with torch.no_grad():
        apply(x)
    twin.__dict__.update(maps)
    names = list(dict.fromkeys(met))
    if len(names) > 1:
        joined = Joined([maps[name] for name in names])
        twin.__dict__.update({name: joined.part(i) for i, name in enumerate(names)})
        return [joined.linear, *[value for name, value in maps.items() if name not in names]]
    return list(maps.values())


class _Listening:
    """A linear map that notes its name in `met` when it is applied to `awaited`."""

    def __init__(self, name: str, linear: Linear, awaited: Tensor, met: list[str]) -> None:
        self.name, self.linear, self.awaited, self.met = name, linear, awaited, met
        self.weight, self.bias = linear.weight, linear.bias

    def __call__(self, x: Tensor) -> Tensor:
        if x is self.awaited:
            self.met.append(self.name)
        return self.linear(x)
