"""How fast a model decodes, by this machine's clock.

Every model is asked for the same: so many rows, so many steps, whatever it answers and however well it was trained.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from ..models import QvattnModel
from .choice import largest
from .session import LeanModel

ROWS = 32
STEPS = 64
LONGEST = 20.0


@torch.inference_mode()
def decode_rate(model: QvattnModel, batch: Mapping[str, Tensor], *, seconds: float = 1.0) -> float | None:
    """New tokens per second of greedy decoding: rows over the median time of a step.

    batch: what the model is evaluated on; its first 32 rows are taken.  A translation model decodes them from the start
    token to the length of the longest reference, a language model continues the first half of each block to its end
    (64 tokens at most).  Reading the sources or prompts is not counted, nor the first step.
    seconds: go through the steps, again and again, until so much time is spent; after 20 s it ends at once.
    None: there is no second step to time.
    """
    lean, ids = LeanModel(model), batch["input_ids"][:ROWS].to(model.device)
    if lean.is_translation:
        mask, steps = batch["attention_mask"][:ROWS].to(model.device), batch["labels"].shape[1]
    else:
        ids, steps = ids.tensor_split(2, dim=1)[0], ids.shape[1] // 2
        mask = torch.ones_like(ids)
    begun, times = time.perf_counter(), list[float]()
    while steps > 1 and (not times or time.perf_counter() - begun < seconds):
        session = lean.open(ids, mask)
        logits = session.begin()
        for step in range(min(steps, STEPS)):
            start = _now(model.device)
            logits = session.step(largest(session.suppress(logits)))
            if step:
                times.append(_now(model.device) - start)
            if times and time.perf_counter() - begun > LONGEST:
                break
    return ids.shape[0] / statistics.median_high(times) if times else None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
