"""Healing: a converted model learns from the original what the conversion lost."""

from .run import heal
from .spec import HealSpec

__all__ = ["HealSpec", "heal"]
