"""The memory arithmetic: what a token costs in the cache, predicted from the variant and measured on stored tensors.

For the model itself, and beside it for MHA, GQA and MQA of the same width, heads and depth.
"""

from __future__ import annotations

import torch

from ...attention import Attention
from ...spec import AttentionSpec
from ...streams import StreamCache
from .result import CheckResult, Details, Step, exactly, information, result, shape
from .subject import Subject

NAME = "memory-arithmetic"
BESIDE = ("mha", "gqa", "mqa")
TOKENS = 8
"""Tokens that the attentions beside the model keep; the bytes of a token do not depend on it."""


@torch.no_grad()
def check(subject: Subject) -> CheckResult:
    """Bytes of the cache after each token of a real sentence, and the same arithmetic for other variants."""
    model, reader = subject.model, subject.longest(1)[0]
    spec, layers = model.attention_spec, len(subject.owners)
    cache = model.new_cache(1)
    elements = [subject.attentions[owner].spec.cache_elements_per_token for owner in subject.owners]
    predicted = sum(elements) * model.dtype.itemsize
    reported: list[int] = []
    stored: list[int] = []
    for token in reader.ids.split(1, dim=1):
        reader.step(token, cache)
        reported.append(cache.nbytes)
        stored.append(stored_bytes(subject, cache))
    wrong = sum(bytes_ != predicted * (i + 1) for i, bytes_ in enumerate(stored))
    rows = [_beside(name, spec, layers, model.dtype) for name in BESIDE]
    own = (f"{spec.variant} (this model)", *_line(spec, layers, model.dtype, predicted, stored[-1] / reader.length))
    full = int(rows[0][4])
    return result(
        NAME,
        "A token costs what the streams of the variant say, no more: predicted and measured bytes agree.",
        [
            exactly("bytes per token, measured on the stored tensors", stored[-1] / reader.length, predicted),
            exactly("bytes per token, as the cache reports them", reported[-1] / reader.length, predicted),
            exactly(
                "bytes per token, as the model counts",
                model.cache_elements_per_token() * model.dtype.itemsize,
                predicted,
            ),
            exactly(f"of {reader.length} lengths, with other bytes than predicted", wrong, 0),
            exactly("of mha, gqa, mqa beside it, with other bytes than predicted", sum(r[4] != r[5] for r in rows), 0),
            information("less than mha of the same width, %", round(100 * (1 - predicted / full), 2)),
            *(
                [information("cross-attention streams of this source, bytes, once", reader.memory.nbytes)]
                if reader.memory
                else []
            ),
        ],
        steps=_steps(subject, cache, predicted, layers),
        details=Details(
            title=f"bytes per token over {layers} layers, {str(model.dtype).removeprefix('torch.')}",
            columns=("variant", "streams", "elements a layer", "layers", "predicted", "measured"),
            rows=(own, *rows),
        ),
    )


def stored_bytes(subject: Subject, cache: StreamCache) -> int:
    """Bytes of the entries that the layers read, counted on the tensors themselves."""
    read = [s for layer in range(len(subject.attentions)) if cache.owns(layer) for s in cache.read(layer).values()]
    return sum(s.numel() * s.element_size() for s in read)


def textbook(variant: str, heads: int, shared: int, d_head: int) -> int:
    """Elements per token and layer, K and V of every head that has its own."""
    return 2 * d_head * {"mha": heads, "gqa": shared, "mqa": 1}[variant]


def _beside(name: str, own: AttentionSpec, layers: int, dtype: torch.dtype) -> tuple[str, str, int, int, int, float]:
    """One other variant at the same width, run on real tensors; predicted by the textbook formula."""
    spec = AttentionSpec(variant=name, d_model=own.d_model, n_heads=own.n_heads, d_head=own.d_head)
    attention = Attention(spec).to(dtype)
    cache = attention.new_cache(1)
    attention(torch.zeros(1, TOKENS, spec.d_model, dtype=dtype), cache=cache)
    stored = sum(s.numel() * s.element_size() for s in cache.read(0).values()) * layers / TOKENS
    predicted = textbook(name, spec.n_heads, spec.v_heads or 1, spec.d_head) * layers * dtype.itemsize
    return name, *_line(spec, layers, dtype, predicted, stored)


def _line(
    spec: AttentionSpec, layers: int, dtype: torch.dtype, predicted: int, measured: float
) -> tuple[str, int, int, int, float]:
    streams = ", ".join(f"{s.name} {s.heads}x{s.width}" for s in spec.streams)
    return streams, predicted // (layers * dtype.itemsize), layers, predicted, measured


def _steps(subject: Subject, cache: StreamCache, predicted: int, layers: int) -> tuple[Step, ...]:
    spec, item = subject.model.attention_spec, subject.model.dtype.itemsize
    kept = cache.read(subject.owners[0])
    terms = " + ".join(f"{s.heads} x {s.width}" for s in spec.streams)
    each = [subject.attentions[owner].spec.cache_elements_per_token for owner in subject.owners]
    alike = len(set(each)) == 1
    a_layer = f"{each[0]} x {layers} layers" if alike else f"({' + '.join(map(str, each))})"
    return (
        Step(
            what="elements of a token in one layer" if alike else "elements of a token in the lowest layer",
            shapes=f"{terms} = {spec.cache_elements_per_token}",
            why="a stream of G heads and width W keeps G x W elements of each token",
        ),
        Step(
            what="bytes of a token",
            shapes=f"{a_layer} x {item} bytes = {predicted:,}",
            why="every layer that makes streams keeps its own; layers that borrow keep none",
        ),
        Step(
            what=f"after {cache.length} tokens",
            shapes=", ".join(f"{name} {shape(s)}" for name, s in kept.items()),
            why=f"{cache.length} x {predicted:,} = {cache.length * predicted:,} bytes in all; no queries, no scores",
        ),
    )
