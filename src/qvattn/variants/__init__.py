"""The table of variants. A new variant: one class, one line here; everything else picks it up."""

from .base import Streams, Terms, Variant
from .keyless import Keyless
from .latent import MLA, QVMLA, MLAWideK
from .normed_value import KEqV
from .separate_keys import GQA, MHA, MQA, SharedV, ThinKey
from .slim import Slim
from .tied import GTA
from .value_and_context import QVKa, QVKaGQA
from .value_only import QV, QVGQA, QVMQA

VARIANTS: dict[str, type[Variant]] = {
    "mha": MHA,
    "gqa": GQA,
    "mqa": MQA,
    "mla": MLA,
    "qv": QV,
    "qv-gqa": QVGQA,
    "qv-mqa": QVMQA,
    "qv-mla": QVMLA,
    "qv-ka": QVKa,
    "qv-ka-gqa": QVKaGQA,
    "shared-v": SharedV,
    "mla-wide-k": MLAWideK,
    "thin-key": ThinKey,
    "keyless": Keyless,
    "k-eq-v": KEqV,
    "gta": GTA,
    "slim": Slim,
}

ALIASES: dict[str, str] = {"qkv": "mha"}

__all__ = ["ALIASES", "VARIANTS", "Streams", "Terms", "Variant"]
