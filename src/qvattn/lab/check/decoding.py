"""Decoding with the cache gives what one full pass gives, however the sentence is split."""

from __future__ import annotations

import torch

from .result import CheckResult, Step, at_most, exactly, information, result, shape
from .subject import Subject, random_chunks

NAME = "decode-equals-full"
TOLERANCE = 1e-5
"""Largest difference of a logit, relative to the largest logit (or to 1, where all are smaller)."""


@torch.no_grad()
def check(subject: Subject) -> CheckResult:
    """Every sentence token by token, and again at random split points, against the full pass."""
    generator = subject.generator()
    worst = largest = 0.0
    disagreements = tokens = 0
    broken = False
    for reader in subject.readers:
        full = reader.full()
        largest = max(largest, float(full.abs().max()))
        for chunks in ([1] * reader.length, random_chunks(reader.length, generator)):
            decoded = torch.cat([logits for logits, _ in reader.steps(chunks)], dim=1)
            difference = float((decoded - full).abs().max())
            broken = broken or not difference < float("inf")
            worst = max(worst, difference)
            disagreements += int((decoded.argmax(-1) != full.argmax(-1)).sum())
            tokens += reader.length
    if broken:
        worst = float("nan")
    reader = subject.readers[0]
    full = reader.full()
    steps = (
        Step(
            what="full pass",
            shapes=f"ids {shape(reader.ids)} -> logits {shape(full)}",
            why="every token at once, the causal mask hides what follows; no cache",
        ),
        Step(
            what="step by step",
            shapes=f"ids (1, 1) x {reader.length} -> logits (1, 1, {full.shape[2]}) each",
            why="each step reads the streams of all earlier tokens and appends its own",
        ),
        Step(
            what="random split points",
            shapes=f"e.g. pieces of {random_chunks(reader.length, subject.generator())} tokens",
            why="a prompt may arrive in any pieces; the mask comes from positions, so no size is special",
        ),
    )
    return result(
        NAME,
        "Decoding with the cache gives the logits of one full pass, at any split into pieces.",
        [
            at_most("largest difference of a logit", worst, TOLERANCE * max(1.0, largest)),
            information("largest logit", largest),
            exactly("tokens with another best guess", disagreements, 0),
            information("tokens compared", tokens),
        ],
        steps=steps,
    )
