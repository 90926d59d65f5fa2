"""What the cache holds of tokens 1..n never changes, whatever follows: history can be kept, forked and shared."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...streams import StreamCache
from .result import CheckResult, Details, Step, above, exactly, information, result, shape
from .subject import Reader, Subject

NAME = "history-invariant"
SENTENCES = 8

Entries = list[Mapping[str, Tensor]]


@torch.no_grad()
def check(subject: Subject) -> CheckResult:
    """Continue a prefix in several ways, by steps and in one piece; compare the prefix's entries bit for bit."""
    compared = changed_by_steps = changed_in_one_piece = 0
    control = 0
    rows: list[tuple[int | str, ...]] = []
    readers = subject.longest(SENTENCES)
    for reader in readers:
        n = reader.length // 2
        tails = continuations(subject, reader, n)
        prefix = reader.fill(reader.ids[:, :n])
        before = entries(subject, prefix, n)
        for tail in tails.values():
            twin = prefix.fork()
            for token in tail.split(1, dim=1):
                reader.step(token, twin)
            changed_by_steps += differing(entries(subject, twin, n), before)
            compared += elements(before)
        whole = [entries(subject, reader.fill(torch.cat((reader.ids[:, :n], t), 1)), n) for t in tails.values()]
        changed_in_one_piece += sum(differing(other, whole[0]) for other in whole[1:])
        compared += elements(before) * (len(whole) - 1)
        other = reader.ids[:, :n].clone()
        other[0, n - 1] = subject.other_token(reader, n - 1)
        control += differing(entries(subject, reader.fill(other), n), before)
        if reader is readers[0]:
            rows = [(name, shape(tail), str(tail[0, :6].tolist())) for name, tail in tails.items()]
    n = readers[0].length // 2
    streams = ", ".join(f"{s.name} (1, {s.heads}, {n}, {s.width})" for s in subject.model.attention_spec.streams)
    return result(
        NAME,
        "What the cache holds of tokens 1..n is bit-identical whatever follows them.",
        [
            exactly("elements changed by decoding on", changed_by_steps, 0),
            exactly("elements that differ when all is computed at once", changed_in_one_piece, 0),
            information("elements compared", compared),
            above("control: elements changed by another token n", control, 0),
        ],
        steps=(
            Step(
                what="prefix of n tokens",
                shapes=f"each layer: {streams}",
                why="an entry is made from its own token's hidden state, which sees earlier tokens only",
            ),
            Step(
                what="decode on from a fork of the cache",
                shapes=f"{len(rows)} continuations of {reader_tail(readers[0], n)} tokens",
                why="a step appends; it neither moves nor rewrites the past",
            ),
            Step(
                what="compute prefix and continuation in one piece",
                shapes=f"ids {shape(readers[0].ids)}",
                why="the causal mask gives what follows a weight of exactly 0, so not one bit of the past moves",
            ),
        ),
        details=Details(
            title="continuations of the first sentence", columns=("kind", "shape", "ids"), rows=tuple(rows)
        ),
    )


def continuations(subject: Subject, reader: Reader, n: int) -> dict[str, Tensor]:
    """Tails (1, T - n): the sentence's own, another sentence's, and one of random tokens."""
    own = reader.ids[:, n:]
    tails = {"its own": own}
    others = [r.ids for r in subject.readers if r is not reader and r.length >= reader.length]
    if others:
        tails["another sentence's"] = others[0][:, n : reader.length]
    size = subject.model.get_input_embeddings().weight.shape[0]
    drawn = torch.randint(min(4, size - 1), size, own.shape, generator=subject.generator())
    tails["random tokens"] = drawn.to(own.device)
    tails["its own, backwards"] = own.flip(1)
    return tails


def entries(subject: Subject, cache: StreamCache, n: int) -> Entries:
    """A copy of the entries of the first n tokens, layer by layer."""
    return [{name: s[:, :, :n].clone() for name, s in cache.read(layer).items()} for layer in subject.owners]


def elements(one: Entries) -> int:
    return sum(s.numel() for layer in one for s in layer.values())


def differing(one: Entries, other: Entries) -> int:
    """Elements that are not the same (NaN is the same as nothing)."""
    return sum(int((a[name] != b[name]).sum()) for a, b in zip(one, other, strict=True) for name in a)


def reader_tail(reader: Reader, n: int) -> int:
    return reader.length - n
