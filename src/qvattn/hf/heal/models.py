"""Loading the two models of a healing run, and saving the healed one beside what the converted checkpoint holds.

A healed checkpoint is the converted one with other weights: everything else in its folder is carried over.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from ...errors import UserError
from ...models import CausalLM

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.pt")
"""Files of a checkpoint that hold weights."""
SECTION = "## Healing"


def load_student(path: str) -> tuple[CausalLM, torch.dtype]:
    """The converted model in fp32, and the precision it is stored in. Raises UserError when it is not one of ours."""
    folder = Path(path)
    kind = model_type(folder)
    if kind != CausalLM.config_class.model_type:
        what = "there is no config.json" if kind is None else f"its model type is {kind!r}"
        raise UserError(f"converted={path!r}: not a converted checkpoint ({what}); make one with qvattn convert")
    student: CausalLM = CausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
    except (OSError, ValueError):
        stored = None
    dtype = getattr(torch, stored, torch.float32) if isinstance(stored, str) else torch.float32
    return student, dtype


def load_teacher(path: str) -> CausalLM:
    """The original model as one of ours, with its own logits, in fp32."""
    if model_type(Path(path)) == CausalLM.config_class.model_type:
        teacher: CausalLM = CausalLM.from_pretrained(path, dtype=torch.float32)
        return teacher
    from .. import adopt

    adopted = adopt(path)
    model: CausalLM = adopted.float()
    return model


def load_words(path: str) -> Any:
    """The tokenizer of the converted checkpoint."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"converted={path!r}: its tokenizer cannot be loaded ({reason})") from error


def model_type(folder: Path) -> str | None:
    """What a checkpoint's config.json says it is; None where there is none."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("model_type") if isinstance(found, dict) else None


def digest_of(model: CausalLM) -> str:
    """Equal for equal weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def save_healed(model: CausalLM, converted: str, out: Path, dtype: torch.dtype, section: str) -> None:
    """Write the healed model into `out`, with everything but weights that the converted checkpoint holds."""
    for file in sorted(Path(converted).iterdir()):
        if file.is_file() and not file.name.startswith(".") and not any(file.match(pattern) for pattern in WEIGHTS):
            shutil.copyfile(file, out / file.name)
    card = out / "README.md"
    before = card.read_text(encoding="utf-8") if card.is_file() else None
    model.to(dtype).save_pretrained(out)
    if before is None and card.is_file():
        before = card.read_text(encoding="utf-8")
    head = (before or f"# {out.name}\n").partition(SECTION)[0].rstrip()
    card.write_text(f"{head}\n\n{SECTION}\n\n{section}", encoding="utf-8")
