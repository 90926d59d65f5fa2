"""Hugging Face models: exact lean caches in place (`lean`), and the same model in our classes (`adopt`)."""

from .exact.api import lean
from .exact.report import LayerReport, LeanReport
from .foreign.adopting import adopt

__all__ = ["LayerReport", "LeanReport", "adopt", "lean"]
