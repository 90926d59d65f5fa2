"""What `lean` did to a model, layer by layer, and how to take it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One attention module.

    name: of the module.  applied: what it keeps and how it reads it, or why it was left as it is.
    bytes_before, bytes_after: cached per token (of the source, for cross-attention) and row.
    folded_bytes: of products of its weights that decoding keeps beside them (once, not per token).
    lean: whether anything was changed.
    """

    name: str
    applied: str
    bytes_before: int
    bytes_after: int
    folded_bytes: int = 0
    lean: bool = True


@dataclass(frozen=True, kw_only=True)
class LeanReport:
    """Per layer what was applied; sums; `undo()`. As a context manager it undoes itself at the end.

    shared_bytes_per_token: kept once for all layers (cos and sin of RoPE), besides the layers' own.
    """

    architecture: str
    layers: tuple[LayerReport, ...]
    shared_bytes_per_token: int = 0
    _undo: Callable[[], None] = field(repr=False)

    @property
    def bytes_per_token_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_per_token_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers) + self.shared_bytes_per_token

    @property
    def folded_bytes(self) -> int:
        return sum(layer.folded_bytes for layer in self.layers)

    def undo(self) -> None:
        """Put the model back as it was. Caches filled since then are of no use to it."""
        self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "architecture": self.architecture,
            "layers": [asdict(layer) for layer in self.layers],
            "shared_bytes_per_token": self.shared_bytes_per_token,
            "bytes_per_token_before": self.bytes_per_token_before,
            "bytes_per_token_after": self.bytes_per_token_after,
            "folded_bytes": self.folded_bytes,
        }

    def __str__(self) -> str:
        lines = [f"{self.architecture}: {self.bytes_per_token_before} -> {self.bytes_per_token_after} bytes a token"]
        lines += [f"  {x.name}: {x.bytes_before} -> {x.bytes_after}, {x.applied}" for x in self.layers]
        if self.shared_bytes_per_token:
            lines.append(f"  once for all layers: {self.shared_bytes_per_token} (cos and sin of each token)")
        if self.folded_bytes:
            lines.append(f"  products of weights kept for decoding: {self.folded_bytes} bytes in all")
        return "\n".join(lines)
