"""Kernels: the softmax exists here and nowhere else."""

from .api import IMPLS, Choice, attend, choose
from .terms import ScoreTerm, ValueTerm

__all__ = ["IMPLS", "Choice", "ScoreTerm", "ValueTerm", "attend", "choose"]
