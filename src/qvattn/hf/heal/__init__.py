"""Healing: a converted model learns from the original what the conversion lost."""

from .memory import keep_freed_memory
from .run import heal
from .spec import HealSpec

__all__ = ["HealSpec", "heal", "keep_freed_memory"]
