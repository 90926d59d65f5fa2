"""Corpora that are made, not read: their rules are known, so what a model finds can be held against the truth.

Modules here know numbers and words only: no tokenizer, no model, no file.
"""

from .controlled import ControlledSpec
from .mqar import MqarSpec

__all__ = ["ControlledSpec", "MqarSpec"]
