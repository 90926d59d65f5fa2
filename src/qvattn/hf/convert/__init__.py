"""Conversion of trained models to variants that cache less, by least squares on calibration text."""

from .perplexity import WindowLosses, window_losses
from .report import Conversion
from .run import Options, convert, convert_layers, weighed
from .specs import Target

__all__ = [
    "Conversion",
    "Options",
    "Target",
    "WindowLosses",
    "convert",
    "convert_layers",
    "weighed",
    "window_losses",
]
