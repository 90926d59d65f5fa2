"""The table of variants. A new variant: one class, one line here; everything else picks it up."""

from .base import Streams, Terms, Variant
from .separate_keys import GQA, MHA, MQA, SharedV, ThinKey
from .value_and_context import QVKa, QVKaGQA
from .value_only import QV, QVGQA, QVMQA

VARIANTS: dict[str, type[Variant]] = {
    "mha": MHA,
    "gqa": GQA,
    "mqa": MQA,
    "qv": QV,
    "qv-gqa": QVGQA,
    "qv-mqa": QVMQA,
    "qv-ka": QVKa,
    "qv-ka-gqa": QVKaGQA,
    "shared-v": SharedV,
    "thin-key": ThinKey,
}

ALIASES: dict[str, str] = {"qkv": "mha"}

__all__ = ["ALIASES", "VARIANTS", "Streams", "Terms", "Variant"]
