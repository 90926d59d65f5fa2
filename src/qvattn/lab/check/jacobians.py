"""Within a layer the query projection does not enter what is cached; the layers above it depend on it.

d(entries of layer m) / d(W_Q of layer l) is zero for every m <= l, and not for the next layer that makes entries. So
the cache of a layer can be built, kept and shared without its queries, though queries do act on the layers above.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...attention import Attention
from .result import CheckResult, Details, Measure, Step, above, exactly, information, result, shape
from .spying import spying
from .subject import Reader, Subject

NAME = "queries-stay-in-their-layer"
PROBES = 4
"""Random directions of the estimate |J|_F^2 = E |u J|^2, u ~ N(0, 1)."""
NO_PATH = "no path"


def check(subject: Subject) -> CheckResult:
    """Jacobians by automatic differentiation, and as a second witness, what a changed W_Q does to the entries."""
    reader = subject.longest(1)[0]
    with torch.enable_grad():
        entries, logits = made_entries(subject, reader)
        weights = [query_parameters(attention) for attention in subject.attentions]
        norms = jacobian_norms(subject, entries, weights)
        to_logits = [_norm(logits, weight, subject.generator()) for weight in weights]
    moved = moved_entries(subject, reader, weights)
    owners, depth = subject.owners, len(weights)
    within = [norms[i][at] for i in range(depth) for at, m in enumerate(owners) if m <= i]
    across = [norms[i][owners.index(m)] for i in range(depth) if (m := _next_owner(owners, i)) is not None]
    moved_within = sum(moved[i][at] for i in range(depth) for at, m in enumerate(owners) if m <= i)
    moved_across = [moved[i][owners.index(m)] for i in range(depth) if (m := _next_owner(owners, i)) is not None]
    measures: list[Measure] = [
        exactly("norm of d entries / d W_Q, same layer and below, largest", max(n or 0.0 for n in within), 0.0),
        exactly("of these, pairs joined by any path", sum(n is not None for n in within), 0),
        exactly("entries moved in the same layer or below by another W_Q", moved_within, 0),
        above("norm of d logits / d W_Q, least", min(n or 0.0 for n in to_logits), 0.0),
    ]
    if across:
        measures.append(above("norm of d entries / d W_Q, next layer, least", min(n or 0.0 for n in across), 0.0))
        measures.append(above("entries moved in the next layer by another W_Q, least", min(moved_across), 0))
    else:
        measures.append(information("next layer", "none makes entries of its own"))
    names = ", ".join(entries[0])
    return result(
        NAME,
        f"W_Q of a layer does not enter that layer's streams ({names}); it does enter the next layer's.",
        measures,
        steps=_steps(subject, reader, entries, weights),
        details=Details(
            title="|d entries / d W_Q| (Frobenius, estimated); row: whose W_Q, column: whose entries",
            columns=("W_Q of layer", *(f"entries of {m}" for m in owners), "logits"),
            rows=tuple((i, *map(_shown, norms[i]), _shown(to_logits[i])) for i in range(depth)),
        ),
    )


def made_entries(subject: Subject, reader: Reader) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The stream entries of each layer that makes some, in a full pass with its graph; and the logits."""
    with spying(subject.model.decoder_stack) as seen:
        logits = reader.full()
    return [dict(seen[layer].entries[-1]) for layer in subject.owners], logits


def query_parameters(attention: Attention) -> list[nn.Parameter]:
    """The parameters from which a layer makes its queries, found by asking its queries for their gradients."""
    variant = attention.variant
    x = torch.randn(1, 2, attention.spec.d_model, device=next(variant.parameters()).device)
    made = variant.queries(x, None)
    parameters = [p for p in variant.parameters() if p.requires_grad]
    total = torch.stack([q.sum() for q in made.values()]).sum()
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return [p for p, g in zip(parameters, found, strict=True) if g is not None]


def jacobian_norms(
    subject: Subject, entries: Sequence[dict[str, Tensor]], weights: Sequence[list[nn.Parameter]]
) -> list[list[float | None]]:
    """[layer of W_Q][owner of entries] -> Frobenius norm, None where no path leads from one to the other."""
    joined = [torch.cat([e.flatten() for e in made.values()]) for made in entries]
    return [[_norm(one, weight, subject.generator()) for one in joined] for weight in weights]


def _norm(output: Tensor, weights: list[nn.Parameter], generator: torch.Generator) -> float | None:
    squares = 0.0
    for _ in range(PROBES):
        probe = torch.randn(output.shape, generator=generator).to(output)
        found = torch.autograd.grad(output, weights, probe, retain_graph=True, allow_unused=True)
        if all(g is None for g in found):
            return None
        squares += sum(float(g.square().sum()) for g in found if g is not None)
    return (squares / PROBES) ** 0.5


@torch.no_grad()
def moved_entries(subject: Subject, reader: Reader, weights: Sequence[list[nn.Parameter]]) -> list[list[int]]:
    """[layer of W_Q][owner of entries] -> elements that are another number once W_Q of that layer is doubled."""
    before, _ = made_entries(subject, reader)
    moved = []
    for weight in weights:
        for p in weight:
            p.mul_(2)  # and halved again below: exact in floating point
        try:
            after, _ = made_entries(subject, reader)
        finally:
            for p in weight:
                p.div_(2)
        moved.append([sum(int((b[n] != a[n]).sum()) for n in b) for b, a in zip(before, after, strict=True)])
    return moved


def _next_owner(owners: list[int], layer: int) -> int | None:
    return next((m for m in owners if m > layer), None)


def _shown(norm: float | None) -> float | str:
    return NO_PATH if norm is None else norm


def _steps(
    subject: Subject, reader: Reader, entries: list[dict[str, Tensor]], weights: list[list[nn.Parameter]]
) -> tuple[Step, ...]:
    query = ", ".join(shape(p) for p in weights[0])
    return (
        Step(
            what="full pass over a real sentence, with its graph",
            shapes=f"ids {shape(reader.ids)}",
            why="entries = f(hidden state below, their own projections); queries = g(the same hidden state, W_Q)",
        ),
        Step(
            what="d entries / d W_Q, same layer",
            shapes=f"{', '.join(f'{n} {shape(e)}' for n, e in entries[0].items())} by W_Q {query}",
            why="queries and entries are siblings: no path from W_Q to the entries of its own layer",
        ),
        Step(
            what="d entries / d W_Q, next layer",
            shapes="the same shapes, one layer up",
            why="W_Q shapes the attention weights, they the hidden state, and the next layer's entries come from it",
        ),
        Step(
            what="double W_Q, compare the entries bit for bit",
            shapes=f"{len(subject.owners)} layers of entries",
            why="a second witness that does not rely on automatic differentiation",
        ),
    )
