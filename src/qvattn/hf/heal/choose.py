"""Which weights learn: by place, by being new, in full or through low-rank updates.

"New" is told by comparing names and shapes with the teacher's, never by the name of a variant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...attention import Attention
from ...errors import UserError
from ...models import CausalLM

TRAINED = "trained.safetensors"


def choose_weights(student: CausalLM, teacher: CausalLM, what: str) -> set[str]:
    """Names of the student's parameters that learn. Raises UserError when there are none."""
    if what == "all":
        return {name for name, _ in student.named_parameters()}
    if what == "new":
        names = new_weights(student, teacher)
        if not names:
            raise UserError("what='new': the converted model has no weight that the teacher lacks; use 'attention'")
        return names
    places = [name for name, module in student.named_modules() if isinstance(module, Attention)]
    return {name for name, _ in student.named_parameters() if any(name.startswith(f"{place}.") for place in places)}


def new_weights(student: CausalLM, teacher: CausalLM) -> set[str]:
    """Parameters of the student that the teacher lacks, or has in another shape."""
    known = {name: parameter.shape for name, parameter in teacher.named_parameters()}
    return {name for name, parameter in student.named_parameters() if known.get(name) != parameter.shape}


class Learner:
    """The student with the chosen weights learning. `merge()` ends it: then the student is a plain model again.

    Raises UserError when LoRA finds no matrix to update.
    """

    def __init__(self, student: CausalLM, teacher: CausalLM, what: str, *, rank: int | None, seed: int) -> None:
        chosen = choose_weights(student, teacher, what)
        self.student = student
        self._adapted: Any = None
        if rank is None:
            for name, parameter in student.named_parameters():
                parameter.requires_grad_(name in chosen)
            return
        matrices = [
            name
            for name, module in student.decoder_stack.named_modules(prefix="decoder")
            if isinstance(module, nn.Linear) and f"{name}.weight" in chosen
        ]
        if not matrices:
            raise UserError(f"lora={rank}: what={what!r} chooses no matrix of a linear layer; leave lora out")
        inside = {f"{name}.{part}" for name in matrices for part in ("weight", "bias")}
        in_full = {
            name: parameter
            for name, parameter in student.named_parameters()
            if name in chosen & new_weights(student, teacher) - inside
        }
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            raise UserError(
                f"lora={rank}: low-rank updates need the package peft (pip install 'qvattn[peft]')"
            ) from None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._adapted = get_peft_model(
                student, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=matrices)
            )
        for parameter in in_full.values():
            parameter.requires_grad_(True)

    @property
    def learning(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: p for name, p in self.student.named_parameters() if p.requires_grad}

    def save(self, folder: Path) -> None:
        """Write what has been learned; the rest of the student is in the converted checkpoint."""
        tensors: dict[str, Tensor] = {name: p.detach().contiguous() for name, p in self.learning.items()}
        save_file(tensors, folder / TRAINED)

    def load(self, folder: Path) -> None:
        """Take up what `save` wrote. Raises UserError when it is not that of these weights."""
        try:
            tensors = load_file(folder / TRAINED)
        except Exception as error:  # safetensors raises its own kinds for a damaged file
            raise UserError(f"{folder / TRAINED}: cannot be read ({error})") from error
        learning = self.learning
        different = sorted(tensors.keys() ^ learning.keys())
        if different:
            raise UserError(f"{folder / TRAINED}: {different[0]} is missing here or there")
        with torch.no_grad():
            for name, parameter in learning.items():
                parameter.copy_(tensors[name])

    def merge(self) -> CausalLM:
        """The student with every low-rank update added to its matrix."""
        if self._adapted is not None:
            merged: Any = self._adapted.merge_and_unload()
            assert merged is self.student
            self._adapted = None
        self.student.requires_grad_(False)
        return self.student
