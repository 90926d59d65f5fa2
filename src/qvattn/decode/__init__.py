"""Decoding: lean loops over stream caches, translation of text, and its scores.

`greedy`, `beam_search` and `sample` give what `model.generate()` gives, with less around the maths. For many batches
make a `LeanModel` once and pass it instead of the model.
"""

from .beam import Hypotheses, beam_search
from .greedy import greedy
from .many import greedy_many
from .sample import sample
from .session import LeanModel

__all__ = ["Hypotheses", "LeanModel", "beam_search", "greedy", "greedy_many", "sample"]
