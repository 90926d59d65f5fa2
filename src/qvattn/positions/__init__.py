"""Position schemes, one file a family. A new scheme: one class and one line here."""

from .absolute import Learned, NoPosition, Sinusoidal
from .agf import AGF, AGFWithPCMV
from .base import DistanceTables, Position, Rotation, rotate
from .bias import T5, ALiBi, Kerple
from .rope import RoPE

POSITIONS: dict[str, type[Position]] = {
    "none": NoPosition,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rope": RoPE,
    "alibi": ALiBi,
    "t5": T5,
    "kerple": Kerple,
    "agf": AGF,
    "agf+pcm-v": AGFWithPCMV,
}

__all__ = ["POSITIONS", "DistanceTables", "Position", "Rotation", "rotate"]
