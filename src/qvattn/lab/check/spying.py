"""Two instruments: what attention asks for, layer by layer, and every tensor that a decoding step leaves behind.

Both only watch. They replace nothing a model computes and leave no trace when they are taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...models import Stack
from ...variants import Terms, Variant


@dataclass
class Seen:
    """What one attention was asked for, in the order of the calls.

    inputs: x (B, M, E) of its queries.  queries, entries: by name.  terms: what its kernel was given.
    """

    cross: bool
    inputs: list[Tensor] = field(default_factory=list)
    queries: list[Mapping[str, Tensor]] = field(default_factory=list)
    entries: list[Mapping[str, Tensor]] = field(default_factory=list)
    terms: list[Terms] = field(default_factory=list)


@contextmanager
def spying(stack: Stack) -> Iterator[list[Seen]]:
    """Watch the self-attention of every layer of `stack`, and after those the cross-attention."""
    blocks = list(stack.blocks())
    watched = [(block.self_attn.variant, Seen(cross=False)) for block in blocks]
    watched += [(block.cross_attn.variant, Seen(cross=True)) for block in blocks if hasattr(block, "cross_attn")]
    before = [(variant, dict(variant.__dict__)) for variant, _ in watched]
    for variant, seen in watched:
        _watch(variant, seen)
    try:
        yield [seen for _, seen in watched]
    finally:
        for variant, attributes in before:
            for name in ("queries", "entries", "expand", "absorb"):
                if name in attributes:
                    variant.__dict__[name] = attributes[name]
                else:
                    variant.__dict__.pop(name, None)


def _watch(variant: Variant, seen: Seen) -> None:
    queries, entries = variant.queries, variant.entries

    def watched_queries(x: Tensor, *rest: Any) -> dict[str, Tensor]:
        made = queries(x, *rest)
        seen.inputs.append(x)
        seen.queries.append(made)
        return made

    def watched_entries(*arguments: Any) -> dict[str, Tensor]:
        made = entries(*arguments)
        seen.entries.append(made)
        return made

    def route(original: Callable[..., Terms]) -> Callable[..., Terms]:
        def watched_route(*arguments: Any) -> Terms:
            made = original(*arguments)
            seen.terms.append(made)
            return made

        return watched_route

    variant.__dict__.update(
        queries=watched_queries, entries=watched_entries, expand=route(variant.expand), absorb=route(variant.absorb)
    )


class Footprints(TorchDispatchMode):
    """Collects the memory of every floating-point tensor that was made or written while this mode was on.

    Memory that was only read (parameters, tables, sources) is not collected. Collected memory is kept alive, so no two
    footprints share an address.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[torch.UntypedStorage, torch.dtype, torch.device]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, tensor: Tensor) -> bool:
        return address(tensor) in self._found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = {address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for argument, value in [*zip(func._schema.arguments, args, strict=False), *_named(func, kwargs)]:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._collect(value)
        out = func(*args, **kwargs)
        self._collect([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and address(leaf) not in read])
        return out

    def _collect(self, value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and address(leaf):
                self._found.setdefault(address(leaf), (leaf.untyped_storage(), leaf.dtype, leaf.device))

    def poison(self, spare: set[int]) -> int:
        """Overwrite all that was collected with NaN, but for the addresses in `spare`; how many were overwritten."""
        doomed = [found for at, found in self._found.items() if at not in spare]
        for storage, dtype, device in doomed:
            torch.empty(0, dtype=dtype, device=device).set_(storage).fill_(float("nan"))
        return len(doomed)


def _named(func: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]


def address(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; the same for all its views."""
    return tensor.untyped_storage().data_ptr()
