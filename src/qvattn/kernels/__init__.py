"""Kernels: the softmax exists here and nowhere else."""

from .api import IMPLS, Choice, attend, attend_with_weights, choose
from .terms import ScoreTerm, ValueTerm

__all__ = ["IMPLS", "Choice", "ScoreTerm", "ValueTerm", "attend", "attend_with_weights", "choose"]
