"""qvattn: attention that stops paying for keys.

One PyTorch module for every way of making keys, a cache that holds only what the next token needs, kernels that read it
once, and a lab that shows what each choice costs.
"""

from .attention import Attention
from .errors import UserError
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
