"""Teacher and student as one module whose loss the training loop minimises.

The loop sees a model that answers (input_ids, labels) with a loss and with sums to report; that a second model stands
beside it is nobody else's business. The teacher is never trained, never saved, and not among the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UserError
from ...models import CausalLM
from ...models.base import QvattnOutput
from ...models.block import Watched, positions_of
from .objective import IGNORED, divergence, hidden_mismatch

SUMS = ("kl", "mismatch", "tokens")
"""What a pair adds up between two readings: summed divergence, summed hidden mismatch, target tokens."""


class DistilledPair(nn.Module):
    """loss per target token = kl_weight * tau^2 KL(teacher || student) + hidden_weight * hidden mismatch.

    layers: whose outputs are matched, counted from 0; none: no hidden states are kept.
    In evaluation mode the divergence is taken at temperature 1. `read("train")` and `read("valid")` give the averages
    since the last reading.

    Raises UserError when the two vocabularies or, with layers to match, the widths or depths differ.
    """

    def __init__(
        self,
        student: CausalLM,
        teacher: CausalLM,
        *,
        kl_weight: float = 1.0,
        hidden_weight: float = 1.0,
        layers: tuple[int, ...] = (),
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        check_pair(student, teacher, layers)
        self.student = student
        self._teacher = (teacher.requires_grad_(False).eval(),)  # in a tuple, so that it is not a part of this module
        self.kl_weight, self.hidden_weight = kl_weight, hidden_weight
        self.layers = layers if hidden_weight else ()
        self.temperature = temperature
        self.sums: dict[str, dict[str, float]] = {kind: dict.fromkeys(SUMS, 0.0) for kind in ("train", "valid")}

    @property
    def teacher(self) -> CausalLM:
        return self._teacher[0]

    def forward(self, input_ids: Tensor, labels: Tensor, **unused: Any) -> QvattnOutput:
        """input_ids, labels (B, T), labels not shifted -> loss, nll, correct, tokens: sums over target tokens."""
        with torch.no_grad():
            target_hidden, target_states = self.run(self.teacher, input_ids)
        hidden, states = self.run(self.student, input_ids)
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        tau = self.temperature if self.training else 1.0
        output, teacher_output = self.student.output_weight, self.teacher.output_weight
        found = divergence(hidden, output, target_hidden, teacher_output, targets, tau)
        loss = self.kl_weight * found.kl
        mismatch = torch.zeros((), device=loss.device)
        if self.layers:
            mismatch = hidden_mismatch(states, target_states) * found.tokens
            loss = loss + self.hidden_weight * mismatch
        sums = self.sums["train" if self.training else "valid"]
        for name, value in zip(SUMS, (found.kl, mismatch, found.tokens), strict=True):
            sums[name] += value.item()
        return QvattnOutput(loss=loss, nll=found.nll, correct=found.correct, tokens=found.tokens)

    def read(self, kind: str) -> dict[str, float]:
        """`{kind}_kl` and `{kind}_hidden`, averages per target token since the last reading; empty if none."""
        sums = self.sums[kind]
        self.sums[kind] = dict.fromkeys(SUMS, 0.0)
        if not sums["tokens"]:
            return {}
        return {f"{kind}_kl": sums["kl"] / sums["tokens"], f"{kind}_hidden": sums["mismatch"] / sums["tokens"]}

    def run(self, model: CausalLM, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """ids (B, T) -> what the output projection sees (B, T, E), and the outputs of the layers to match."""
        watched = Watched(keep_weights=False) if self.layers else None
        hidden = model.hidden(ids, positions_of(torch.ones_like(ids)), None, watched)
        return hidden, [] if watched is None else [watched.hidden[layer + 1] for layer in self.layers]


def check_pair(student: CausalLM, teacher: CausalLM, layers: tuple[int, ...]) -> None:
    """Raise UserError, naming the field, when the student cannot learn from this teacher."""
    own, other = student.config, teacher.config
    fields = ("vocab_size", "d_model", "layers") if layers else ("vocab_size",)
    for field in fields:
        if getattr(own, field) != getattr(other, field):
            raise UserError(
                f"teacher: {field}={getattr(other, field)} differs from the converted model's {getattr(own, field)}; "
                + ("give the model it was converted from" if field == "vocab_size" else "set the hidden weight to 0")
            )
    for layer in layers:
        if not 0 <= layer < own.layers:
            raise UserError(f"layers: {layer} is not one of the model's layers 0 to {own.layers - 1}")
