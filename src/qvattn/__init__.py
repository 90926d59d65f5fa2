"""qvattn: attention that stops paying for keys.

One PyTorch module for every way of making keys, a cache that holds only what the next token needs, kernels that read it
once, and a lab that shows what each choice costs.

The public names are imported when they are first used, so that the command line starts without PyTorch; our models are
registered with transformers' Auto classes as soon as transformers is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .registration import register_with_transformers

if TYPE_CHECKING:
    from .attention import Attention
    from .geometry import Geometry
    from .kernels import ScoreTerm, ValueTerm, attend
    from .spec import AttentionSpec, PositionSpec, presets
    from .streams import Stream, StreamCache

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "AttentionSpec",
    "Geometry",
    "PositionSpec",
    "ScoreTerm",
    "Stream",
    "StreamCache",
    "UserError",
    "ValueTerm",
    "attend",
    "presets",
]

_HOME = {
    "Attention": "attention",
    "AttentionSpec": "spec",
    "Geometry": "geometry",
    "PositionSpec": "spec",
    "ScoreTerm": "kernels",
    "Stream": "streams",
    "StreamCache": "streams",
    "ValueTerm": "kernels",
    "attend": "kernels",
    "presets": "spec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_transformers()
