"""Past score rows do not give the new row: neither a linear combination of them nor any other function.

Row t of the causal score matrix has t entries; row i < t has i, the rest padded with zeros. Two things are measured:

* the residual of the best linear reconstruction of row t from all past rows (least squares). No past row has an entry
  for key t, so the residual is never below |s_tt|.
* the new row over the *old* keys, for another real token t after the same past. The past rows are bit-identical and the
  new row is not; a function of the past rows would have to give both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention import Attention
from ...geometry import Geometry
from ...kernels.terms import per_query_head
from ...models import Watched
from ...variants import Terms
from .result import CheckResult, Details, Step, above, at_least, at_most, exactly, information, result
from .spying import spying
from .subject import Reader, Subject

NAME = "past-scores-insufficient"
SENTENCES = 8
ROWS = 8
"""New rows that are reconstructed in each sentence, spread evenly."""
CLEARLY = 1e-3
"""A median relative residual, or change, from which a row counts as not given by the past."""
ROUNDING = 1e-8
"""Residual that float64 least squares leaves of a row that is a combination, with room."""


@dataclass
class Layer:
    """Relative residuals and changes of one layer, over heads, rows and sentences."""

    residuals: list[Tensor]
    old_keys: list[Tensor]
    changes: list[Tensor]


@torch.no_grad()
def check(subject: Subject) -> CheckResult:
    """Least squares over the real score rows of every head, and a swap of the newest token."""
    depth = len(subject.attentions)
    layers = [Layer([], [], []) for _ in range(depth)]
    off = 0.0
    moved = 0
    control: list[Tensor] = []
    for reader in subject.longest(SENTENCES):
        last = reader.length - 1
        other = reader.ids.clone()
        other[0, last] = subject.other_token(reader, last)
        rows, difference = score_rows(subject, reader, reader.ids)
        swapped, _ = score_rows(subject, reader, other)
        off = max(off, difference)
        for layer, one, two in zip(layers, rows, swapped, strict=True):
            for t in range(max(2, last - (ROWS - 1) * max(1, last // ROWS)), last + 1, max(1, last // ROWS)):
                layer.residuals.append(residual(one[:, :t, : t + 1], one[:, t, : t + 1]))
                layer.old_keys.append(residual(one[:, :t, :t], one[:, t, :t]))
                control.append(residual(one[:, :t, : t + 1], combination(one[:, :t, : t + 1], subject)))
            moved += int((one[:, :last] != two[:, :last]).sum())
            layer.changes.append(relative(two[:, last, :last] - one[:, last, :last], one[:, last, :last]))
    table = [_row(i, layer) for i, layer in enumerate(layers)]
    return result(
        NAME,
        "The new score row cannot be had from the past rows: it needs the new query and all past keys.",
        [
            at_least("relative residual, least median of a layer", min(row[2] for row in table), CLEARLY),
            above("relative residual, least of all", min(row[1] for row in table), ROUNDING),
            at_most("control: residual of a row that is a combination", _finite_max(control), ROUNDING),
            exactly("score entries of the past moved by another token t", moved, 0),
            at_least(
                "change of the new row over the old keys, least median of a layer", min(r[5] for r in table), CLEARLY
            ),
            at_most("rows against the kernel's own weights, largest difference", off, 1e-5),
            information("rows reconstructed", sum(int(x.numel()) for layer in layers for x in layer.residuals)),
        ],
        steps=_steps(subject),
        details=Details(
            title="relative residual of row t from rows 1..t-1, and change of row t for another token t",
            columns=(
                "layer",
                "residual min",
                "residual median",
                "residual max",
                "old keys only, median",
                "change median",
            ),
            rows=tuple(table),
        ),
        notes=(
            "The residual is at least |s_tt| / |row t|: no past row has an entry for the newest key.",
            "Over the old keys alone least squares fits (nearly) exactly, as it fits any row whatever: t-1 unknowns "
            "meet t-1 equations of a triangular matrix. The coefficients come from the row itself, so nothing is "
            "predicted; the swap of token t shows that: same past rows, another new row.",
            "Once there are more past tokens than a head is wide, q_t is a combination of past queries; but its "
            "coefficients come from q_t, and the past rows, which end at their own token, lack the keys it needs.",
        ),
    )


def _row(index: int, layer: Layer) -> tuple[int, float, float, float, float, float]:
    residuals, old, changes = (torch.cat(x) for x in (layer.residuals, layer.old_keys, layer.changes))
    median = [float(x.nanmedian()) for x in (residuals, old, changes)]
    seen = residuals[~residuals.isnan()]
    low, high = (float(seen.min()), float(seen.max())) if len(seen) else (float("nan"), float("nan"))
    return index, low, median[0], high, median[1], median[2]


def _finite_max(values: list[Tensor]) -> float:
    joined = torch.cat(values)
    kept = joined[~joined.isnan()]
    return float(kept.max()) if len(kept) else float("nan")


def score_rows(subject: Subject, reader: Reader, ids: Tensor) -> tuple[list[Tensor], float]:
    """The scores before the softmax of every layer, (H, T, T) float64 with zeros where a query does not see a key.

    Also the largest difference between their softmax and the weights the kernel itself returns.
    """
    watched = Watched()
    with spying(subject.model.decoder_stack) as seen:
        reader.full(ids, watched)
    spec = subject.model.attention_spec
    seen_by_first = Geometry.contiguous(ids.shape[1], causal=spec.causal, window=spec.window, device=ids.device)
    all_rows, off = [], 0.0
    for attention, one, weights in zip(subject.attentions, seen, watched.self_weights, strict=False):
        geometry = seen_by_first.with_window(attention.spec.window)
        s = scores(attention, one.terms[-1], geometry)
        visible = geometry.visible
        masked = s if visible is None else s.masked_fill(~visible, float("-inf"))
        off = max(off, float((masked.softmax(-1) - weights).abs().max()))
        all_rows.append((s if visible is None else s.masked_fill(~visible, 0.0))[0].double().cpu())
    return all_rows, off


def scores(attention: Attention, terms: Terms, geometry: Geometry) -> Tensor:
    """mul * scale * sum of q . k + add, (1, H, T, T), from what the kernel was given."""
    heads = attention.spec.n_heads
    products = [t.q.double() @ per_query_head(t.keys().double(), heads, t.groups).mT for t in terms.scores]
    s = functools.reduce(torch.add, products) * attention.variant.scale
    tables = None
    if attention.position.has_tables:
        tables = attention.position.tables(*geometry.delta_range, device=s.device)
    if tables is not None and tables.mul is not None:
        s = s * geometry.spread(tables.mul.double(), tables.delta_min)
    if tables is not None and tables.add is not None:
        s = s + geometry.spread(tables.add.double(), tables.delta_min)
    return s


def residual(past: Tensor, row: Tensor) -> Tensor:
    """Past rows (H, t, N), new row (H, N) -> |row - best combination| / |row| for each head; NaN where row is zero."""
    basis = past.mT
    coefficients = torch.linalg.lstsq(basis, row[:, :, None], driver="gelsd").solution
    return relative((basis @ coefficients)[:, :, 0] - row, row)


def relative(difference: Tensor, row: Tensor) -> Tensor:
    size = row.norm(dim=-1)
    return torch.where(size > 0, difference.norm(dim=-1) / size, torch.nan)


def combination(past: Tensor, subject: Subject) -> Tensor:
    """A row (H, N) that is a random combination of the past rows (H, t, N)."""
    drawn = torch.randn(past.shape[:2], generator=subject.generator(), dtype=past.dtype)
    return (drawn[:, None] @ past)[:, 0]


def _steps(subject: Subject) -> tuple[Step, ...]:
    t = subject.longest(1)[0].length
    h = subject.model.attention_spec.n_heads
    return (
        Step(
            what="score rows of a real sentence",
            shapes=f"{h} heads x ({t}, {t}), lower triangle",
            why="row t = q_t . every key up to t; what a score cache would have kept",
        ),
        Step(
            what="best combination of past rows",
            shapes=f"({t}, {t - 1}) x ({t - 1},) ~ ({t},)",
            why="past rows padded to the new length; key t has a zero in every one of them",
        ),
        Step(
            what="another real token t, the same past",
            shapes=f"past rows ({t - 1}, {t - 1}) equal, new row ({t - 1},) over old keys differs",
            why="so no function of the past rows gives the new row, linear or not",
        ),
    )
