"""What a launcher says about a run: `accelerate launch` speaks through environment variables, a recipe through fields.

The recipe decides precision, accumulation and clipping; a launcher decides how many processes there are and whether
they divide the model. What a launcher asks for and we do not do is refused, never ignored.
"""

from __future__ import annotations

import os
from typing import Any

from ..errors import UserError
from .recipe import TrainSpec

REFUSED = {
    "FSDP_OFFLOAD_PARAMS": "offloading parameters to the CPU",
    "FSDP_ACTIVATION_CHECKPOINTING": "activation checkpointing",
}


def from_launcher(spec: TrainSpec) -> TrainSpec:
    """The training section with what `accelerate launch` asks for.

    `--use_fsdp --fsdp_version 2` is `train.parallel: fsdp2`. Accelerate itself is then not told of FSDP: it would
    divide other modules than those that our models run, and on GPUs only.
    Raises `UserError` for what is not supported: FSDP 1, offloading, DeepSpeed, Megatron.
    """
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"):
        if _says_yes(name):
            raise UserError(f"{name.removeprefix('ACCELERATE_USE_')}: not supported; use DDP or FSDP2 (--use_fsdp)")
    if not _says_yes("ACCELERATE_USE_FSDP"):
        return spec
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(f"fsdp_version={version}: FSDP 1 is not supported; give --fsdp_version 2")
    for name, what in REFUSED.items():
        if _says_yes(name):
            raise UserError(f"{name.lower()}: {what} is not supported; set it to false")
    del os.environ["ACCELERATE_USE_FSDP"]
    changes: dict[str, Any] = {"parallel": "fsdp2"}
    if "FSDP_RESHARD_AFTER_FORWARD" in os.environ:
        changes["reshard_after_forward"] = _says_yes("FSDP_RESHARD_AFTER_FORWARD")
    return spec.model_copy(update=changes)


def _says_yes(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")
