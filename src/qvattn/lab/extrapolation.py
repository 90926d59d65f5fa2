"""Extrapolation: what a language model makes of more context than it was trained on.

Every length scores the same tokens: passages spread over the held-out text. At length L a passage is read in windows of
L tokens, of which at most the last half is scored, so that every scored token sees between L / 2 and L tokens. A longer
window only shows the model more of what came before: perplexity falls where the context is put to use, stays where it
is ignored, and rises where the position scheme breaks down. Positions count from 0 in each window, as in training.

Reads runs, trains nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import TextDataset, Tokenizers, load_text
from ..data.spec import DataSpec
from ..errors import UserError
from ..files import write_atomically
from ..models import CausalLM
from ..train.checkpoint import find_checkpoint
from ..train.recipe import Recipe, read_recipe, slugify
from .check.loading import load
from .experiment import RECIPE_NAME
from .runs import RunRecord, find_runs, read_json, read_run, read_yaml
from .statistics import Estimate, estimate, paired_difference

Split = Literal["valid", "test"]
FACTORS = (1, 2, 4, 8, 16)
"""Default lengths, in units of the length of training."""
BATCH_TOKENS = 2048
Ids = npt.NDArray[np.int64]
_TENSOR_NAMES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is scored: `passages` of `scored` tokens each, at every one of `lengths`."""

    lengths: tuple[int, ...]
    scored: int = 256
    passages: int = 24
    split: Split = "test"
    checkpoint: Literal["best", "last"] = "best"

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 2:
            raise UserError(f"lengths={list(self.lengths)}: give different lengths of 2 and more, from short to long")
        if self.scored < 1 or self.passages < 1:
            raise UserError(f"scored={self.scored}, passages={self.passages}: both must be 1 or more")

    @property
    def reach(self) -> int:
        """Tokens that a passage and what any window shows before it take together."""
        return max(self.scored - min(self.scored, length // 2) + length for length in self.lengths)

    def pieces(self, length: int) -> list[tuple[int, int]]:
        """(first, end) within the passage of what each window of `length` tokens scores; it ends where they end."""
        most = length // 2
        return [(start, min(start + most, self.scored)) for start in range(0, self.scored, most)]

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {**vars(self), "lengths": list(self.lengths)}


def passages(ids: Ids, settings: Settings) -> Ids:
    """(passages, reach) token ids: each passage at the end of its row, spread evenly over `ids` (N,).

    Raises UserError where not even one fits, or passages would overlap.
    """
    reach, count = settings.reach, settings.passages
    room = len(ids) - reach
    if room < 0:
        raise UserError(
            f"the {settings.split} split has {len(ids):,} tokens, {reach:,} are needed for one passage: lower --lengths"
        )
    if count > 1 and room // (count - 1) < settings.scored:
        raise UserError(
            f"{count} passages of {settings.scored} tokens would overlap in {len(ids):,} tokens: "
            f"at most {room // settings.scored + 1} passages"
        )
    ends = reach + (np.arange(count) * room // max(count - 1, 1))
    return np.stack([ids[end - reach : end] for end in ends])


@torch.inference_mode()
def passage_losses(model: CausalLM, tokens: Ids, settings: Settings) -> npt.NDArray[np.float64]:
    """(lengths, passages): negative log-likelihood in nats per scored token, for rows (N, reach) of `passages`."""
    model.eval()
    sums = np.zeros((len(settings.lengths), len(tokens)))
    for row, length in enumerate(settings.lengths):
        at_once = max(1, BATCH_TOKENS // length)
        for first, end in settings.pieces(length):
            stop = tokens.shape[1] - settings.scored + end
            for start in range(0, len(tokens), at_once):
                ids = torch.from_numpy(tokens[start : start + at_once, stop - length : stop])
                sums[row, start : start + len(ids)] += _nll(model, ids, end - first)
    return sums / settings.scored


def _nll(model: CausalLM, ids: Tensor, scored: int) -> npt.NDArray[np.float64]:
    """(B,): summed over the last `scored` tokens of ids (B, L)."""
    positions = torch.arange(ids.shape[1], dtype=torch.int32).expand(ids.shape)
    hidden = model.hidden(ids, positions)[:, -scored - 1 : -1]
    logits = model.logits(hidden).double()
    nll = F.cross_entropy(logits.flatten(0, 1), ids[:, -scored:].flatten(), reduction="none")
    sums: npt.NDArray[np.float64] = nll.view(len(ids), scored).sum(dim=1).numpy()
    return sums


def held_out(data: DataSpec, tokenizers: Tokenizers, split: Split) -> Ids:
    """The tokens of a held-out split, end to end as in training."""
    documents = getattr(load_text(data), split)
    if not documents:
        raise UserError(f"data.corpus={data.corpus!r} has no {split} split: choose another --split")
    return TextDataset.encode(documents, tokenizers.target, 1, f"data: {split} split").blocks[:, 0].astype(np.int64)


def measure(run: Path, settings: Settings) -> dict[str, Any]:
    """One run at every length, in JSON's types. Raises UserError for what is not a language model of running text."""
    recipe = _recipe(run)
    model = load(find_checkpoint(run, settings.checkpoint))
    assert isinstance(model, CausalLM)
    spec = model.attention_spec
    longest = spec.position.options.get("max_length") if spec.position.kind == "learned" else None
    if longest is not None and settings.lengths[-1] > longest:
        raise UserError(f"{run}: learned positions go up to {longest}; lengths beyond cannot be asked for")
    tokens = passages(held_out(recipe.data, Tokenizers.load(run), settings.split), settings)
    losses = passage_losses(model, tokens, settings)
    if not np.isfinite(losses).all():
        raise UserError(f"{run}: losses are not finite; nothing to compare")
    return {
        "name": recipe.name,
        "seed": recipe.train.seed,
        "trained_length": recipe.data.block_size,
        "variant": spec.variant,
        "position": spec.position.kind,
        "settings": settings.as_dict(),
        "nll": losses.mean(axis=1).tolist(),
        "passage_nll": [[round(float(x), 5) for x in row] for row in losses],
    }


def measure_all(
    directories: Sequence[Path], chosen: dict[str, Any], *, say: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Every finished language model in the directories. What was measured before, at the same settings, is read back.

    chosen: fields of `Settings`; without `lengths`, FACTORS of the shortest trained length are taken.
    The result of a run lies beside its comparison: DIR/extrapolation/NAME--seedN.json.
    """
    found = {path: root for root in reversed(directories) for path in find_runs(root)}
    runs = [(root, read_run(path)) for path, root in found.items()]
    usable = [(root, run) for root, run in runs if run.complete and _is_text(run)]
    if not usable:
        names = ", ".join(map(str, directories))
        raise UserError(f"{names}: no finished run of a language model on text (recipe `extrapolation`)")
    shortest = min(int(run.recipe["data"]["block_size"]) for _, run in usable)
    settings = Settings(**{"lengths": tuple(shortest * k for k in FACTORS), **chosen})
    results = []
    for root, run in usable:
        store = root / "extrapolation" / f"{slugify(run.name)}--seed{run.seed}.json"
        known = read_json(store, strict=False)
        stamp = _stamp(run.directory, settings)
        if known.get("settings") != settings.as_dict() or known.get("weights") != stamp:
            known = {**measure(run.directory, settings), "weights": stamp}
            store.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(store, json.dumps(known, ensure_ascii=False, allow_nan=False) + "\n")
            perplexities = ", ".join(
                f"{n}: {math.exp(x):.2f}" for n, x in zip(settings.lengths, known["nll"], strict=True)
            )
            say(f"{run.name}, seed {run.seed}: {perplexities}")
        results.append(known)
    return _ordered(results, directories)


def _stamp(run: Path, settings: Settings) -> str:
    """What tells one state of a checkpoint's weights from another without reading them."""
    folder = find_checkpoint(run, settings.checkpoint).resolve()
    files = [folder / name for name in _TENSOR_NAMES if (folder / name).is_file()]
    return ", ".join(f"{f.parent.name}/{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)


def _recipe(run: Path) -> Recipe:
    recipe = read_recipe((run / "recipe.yaml").read_text(encoding="utf-8"), origin=str(run / "recipe.yaml"))
    if recipe.task != "causal-lm" or recipe.data.corpus == "mqar":
        raise UserError(f"{run}: task {recipe.task!r} on {recipe.data.corpus!r}: a language model on text is needed")
    return recipe


def _is_text(run: RunRecord) -> bool:
    return run.recipe.get("task") == "causal-lm" and run.recipe.get("data", {}).get("corpus") != "mqar"


def _ordered(results: list[dict[str, Any]], directories: Sequence[Path]) -> list[dict[str, Any]]:
    """In the order in which the comparisons list their variants."""
    planned: list[str] = []
    for directory in directories:
        grid = read_yaml(directory / RECIPE_NAME).get("compare") or {}
        planned += [str(variant.get("name")) for variant in grid.get("variants", ())]
    order = {name: i for i, name in enumerate(dict.fromkeys(planned))}
    return sorted(results, key=lambda one: (order.get(one["name"], len(order)), one["name"], one["seed"]))


# -- several runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant at one length over its seeds.

    perplexity: the exponential of the mean loss of each seed.  change: loss less that at the shortest length, in nats,
    paired by seed.  difference: loss less the baseline's at this length, in nats, paired by seed; None of the baseline.
    """

    length: int
    perplexity: Estimate
    change: Estimate
    difference: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One variant at all lengths."""

    name: str
    trained_length: int
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    is_baseline: bool

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        cells = [
            {
                "length": c.length,
                "perplexity": c.perplexity.model_dump(),
                "change": c.change.model_dump(),
                "difference": None if c.difference is None else c.difference.model_dump(),
            }
            for c in self.cells
        ]
        return {**vars(self), "seeds": list(self.seeds), "cells": cells}


def summary(results: Sequence[dict[str, Any]], *, baseline: str | None = None) -> list[Line]:
    """A line per variant. baseline: the variant that differences are taken to, default the first.

    Raises UserError if no variant is called so.
    """
    names = list(dict.fromkeys(one["name"] for one in results))
    base = names[0] if baseline is None else next((n for n in names if slugify(n) == slugify(baseline)), None)
    if base is None:
        raise UserError(f"--baseline {baseline!r} is not among the variants; allowed: {', '.join(names)}")
    by_name = {name: [one for one in results if one["name"] == name] for name in names}
    return [_line(name, by_name[name], by_name[base]) for name in names]


def _line(name: str, runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> Line:
    cells = []
    for i, length in enumerate(runs[0]["settings"]["lengths"]):
        own = {run["seed"]: run["nll"][i] for run in runs}
        other = {run["seed"]: run["nll"][i] for run in base}
        cells.append(
            Cell(
                length=length,
                perplexity=estimate([math.exp(x) for x in own.values()]),
                change=estimate([run["nll"][i] - run["nll"][0] for run in runs]),
                difference=None if base is runs else paired_difference(own, other),
            )
        )
    return Line(
        name=name,
        trained_length=runs[0]["trained_length"],
        seeds=tuple(run["seed"] for run in runs),
        cells=tuple(cells),
        is_baseline=base is runs,
    )


def markdown(lines: Sequence[Line]) -> str:
    """Two tables: perplexity, and the loss beyond the shortest length; both by length."""
    lengths = [cell.length for cell in lines[0].cells]
    rule = "|---|" + "---:|" * len(lengths)
    head = "| variant | " + " | ".join(f"{n:,}" for n in lengths) + " |"
    perplexity = [head, rule, *(_cells(line, lambda cell: cell.perplexity, "{:.2f}") for line in lines)]
    change = [head, rule, *(_cells(line, lambda cell: cell.change, "{:+.3f}") for line in lines)]
    return (
        "Perplexity of the same tokens, by the tokens in the window:\n\n"
        + "\n".join(perplexity)
        + f"\n\nLoss less that at {lengths[0]} tokens, nats per token, paired by seed:\n\n"
        + "\n".join(change)
        + "\n"
    )


def _cells(line: Line, pick: Callable[[Cell], Estimate], form: str) -> str:
    texts = []
    for cell in line.cells:
        value = pick(cell)
        bar = "" if value.half_width is None else " ± " + form.replace("+", "").format(value.half_width)
        texts.append(form.format(value.mean) + bar)
    return f"| {line.name} | " + " | ".join(texts) + " |"
