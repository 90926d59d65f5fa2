"""Hugging Face models as they are: exact lean caches (`lean`)."""

from .exact.api import lean
from .exact.report import LayerReport, LeanReport

__all__ = ["LayerReport", "LeanReport", "lean"]
