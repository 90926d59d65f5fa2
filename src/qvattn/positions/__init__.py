"""Position schemes, one file a family. A new scheme: one class and one line here."""

from .absolute import Learned, NoPosition, Sinusoidal
from .agf import AGF, AGFWithPCMV
from .base import DistanceTables, Position, Rotation, rotate

POSITIONS: dict[str, type[Position]] = {
    "none": NoPosition,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "agf": AGF,
    "agf+pcm-v": AGFWithPCMV,
}

__all__ = ["POSITIONS", "DistanceTables", "Position", "Rotation", "rotate"]
