"""From finished runs to the rows of a comparison: intervals, paired differences, costs.

Must never mix runs that are not finished into a row, nor drop a run without saying so in `notes`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from qvattn.lab.runs import RunRecord
from qvattn.lab.statistics import Estimate, estimate, paired_difference

ACCURACY = ("valid", "accuracy")
ACCURACY_NOTE = (
    "Token accuracy is teacher-forced, over non-padding target tokens, end-of-sentence included, unsmoothed; "
    "perplexity is the exponential of the unsmoothed cross-entropy over the same tokens. Validation scores are the "
    "model's after its last step; test scores, where given, are its best checkpoint's."
)
INTERVAL_NOTE = (
    "± is half of a 95 % Student-t interval over seeds; differences to the baseline are paired by seed. "
    "Intervals are per row, not corrected for the number of rows."
)
DECODE_NOTE = (
    "Decode tokens/s: greedy decoding of 32 validation rows at once, rows over the median time of a step, without the "
    "reading of sources or prompts; short contexts, where weights and not the cache take the time."
)
ONE_SEED_NOTE = "One seed: no interval can be given. Run at least three seeds before a claim."


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Frozen):
    """One variant of a comparison; accuracies are fractions, `per_seed` holds each seed's validation accuracy,
    and `best_accuracy` is that of the best checkpoint."""

    name: str
    variant: Any = None
    seeds: tuple[int, ...]
    is_baseline: bool
    accuracy: Estimate | None
    per_seed: dict[int, float]
    difference: Estimate | None
    perplexity: Estimate | None
    best_accuracy: Estimate | None
    test_accuracy: Estimate | None
    test_perplexity: Estimate | None
    bleu: Estimate | None
    chrf: Estimate | None
    parameters_total: int | None
    parameters_attention: int | None
    cache_elements_per_token_layer: int | None
    cache_elements_per_token_model: int | None
    cache_share: float | None
    train_tokens_per_second: float | None
    decode_tokens_per_second: float | None = None


class FailedRun(_Frozen):
    """A run without results: which one, where it wrote, and the last thing it said."""

    name: str
    seed: int
    directory: str
    log: str
    reason: str


class Comparison(_Frozen):
    """A table of variants; `provenance` says how it came about (command, versions, machine, commit)."""

    format: int = 1
    title: str
    baseline: str | None
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    failed: tuple[FailedRun, ...] = ()
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        return not self.failed and all(row.accuracy is not None for row in self.rows)


def summarise(
    runs: Iterable[RunRecord],
    *,
    title: str,
    baseline: str | None,
    names: Sequence[str] = (),
    failed: Sequence[FailedRun] = (),
    side_by_side: int | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Comparison:
    """Group finished runs by name and compute every row.

    Args:
        runs: run records in any order; unfinished ones are only counted.
        baseline: the name of the row that differences are taken to; None for no differences.
        names: rows in this order come first, also when they have no finished run.
        side_by_side: how many runs shared the machine at once, if known (a note tells readers of tokens/s).
    """
    groups: dict[str, list[RunRecord]] = {name: [] for name in names}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    finished = {name: [run for run in group if run.complete] for name, group in groups.items()}
    base = finished.get(baseline, []) if baseline is not None else []
    rows = tuple(_row(name, group, base, is_baseline=name == baseline) for name, group in finished.items())
    seeds = sorted({seed for row in rows for seed in row.seeds})
    return Comparison(
        title=title,
        baseline=baseline,
        seeds=tuple(seeds),
        rows=rows,
        failed=tuple(failed),
        notes=tuple(_notes(groups, rows, baseline, side_by_side)),
        provenance=dict(provenance or {}),
    )


def _row(name: str, runs: list[RunRecord], base: list[RunRecord], *, is_baseline: bool) -> Row:
    first = runs[0] if runs else None
    cache = _whole(first, "cache_elements_per_token", "model")
    base_cache = _whole(base[0], "cache_elements_per_token", "model") if base else None
    accuracy = _by_seed(runs, *ACCURACY)
    return Row(
        name=name,
        variant=first.results.get("variant") if first else None,
        seeds=tuple(sorted(run.seed for run in runs)),
        is_baseline=is_baseline,
        accuracy=_estimate(accuracy),
        per_seed=accuracy,
        difference=None if is_baseline else paired_difference(accuracy, _by_seed(base, *ACCURACY)),
        perplexity=_estimate(_by_seed(runs, "valid", "perplexity")),
        best_accuracy=_estimate(_by_seed(runs, "best", "accuracy")),
        test_accuracy=_estimate(_by_seed(runs, "test", "accuracy")),
        test_perplexity=_estimate(_by_seed(runs, "test", "perplexity")),
        bleu=_estimate(_score(runs, "bleu")),
        chrf=_estimate(_score(runs, "chrf")),
        parameters_total=_whole(first, "parameters", "total"),
        parameters_attention=_whole(first, "parameters", "attention"),
        cache_elements_per_token_layer=_whole(first, "cache_elements_per_token", "layer"),
        cache_elements_per_token_model=cache,
        cache_share=cache / base_cache if cache is not None and base_cache else None,
        train_tokens_per_second=_median(_by_seed(runs, "train_tokens_per_second")),
        decode_tokens_per_second=_median(_by_seed(runs, "decode_tokens_per_second")),
    )


def _notes(
    groups: Mapping[str, list[RunRecord]], rows: Sequence[Row], baseline: str | None, side_by_side: int | None
) -> list[str]:
    notes = [ACCURACY_NOTE]
    counts = {len(row.seeds) for row in rows if row.seeds}
    if counts - {1}:
        notes.append(INTERVAL_NOTE)
    if 1 in counts:
        single = [row.name for row in rows if len(row.seeds) == 1]
        notes.append(ONE_SEED_NOTE if counts == {1} else f"{ONE_SEED_NOTE} (This holds for: {', '.join(single)}.)")
    if len({row.seeds for row in rows if row.seeds}) > 1:
        held = "; ".join(f"{row.name}: {', '.join(map(str, row.seeds)) or 'none'}" for row in rows)
        advice = "" if baseline is None else ", so go by the paired differences"
        notes.append(f"The rows do not hold the same seeds ({held}){advice}.")
    pending = {name: sum(not run.complete for run in group) for name, group in groups.items()}
    if any(pending.values()):
        listed = ", ".join(f"{name}: {count}" for name, count in pending.items() if count)
        notes.append(f"Runs that are not finished are left out of the table ({listed}).")
    if baseline is not None and not any(row.is_baseline and row.seeds for row in rows):
        notes.append(f"The baseline {baseline} has no finished run, so there are no differences to it.")
    notes.append("Tokens/s are medians over seeds" + _company(side_by_side))
    if any(row.decode_tokens_per_second for row in rows):
        notes.append(DECODE_NOTE)
    return notes


def _company(side_by_side: int | None) -> str:
    """How a speed was measured: beside how many other runs."""
    if side_by_side is None:
        return "."
    if side_by_side == 1:
        return "; runs ran one after the other."
    return (
        f", measured with up to {side_by_side} runs side by side on this machine; "
        "it compares rows with each other, not with other machines."
    )


def _by_seed(runs: Iterable[RunRecord], *path: str) -> dict[int, float]:
    found = {run.seed: run.number(*path) for run in runs}
    return {seed: value for seed, value in sorted(found.items()) if value is not None}


def _score(runs: Sequence[RunRecord], metric: str) -> dict[int, float]:
    """BLEU or chrF by seed: a number, or a mapping with `score`, in the test results or else at the top."""
    for path in (("test", metric), ("test", metric, "score"), (metric,), (metric, "score")):
        if values := _by_seed(runs, *path):
            return values
    return {}


def _estimate(values: Mapping[int, float]) -> Estimate | None:
    return estimate(list(values.values())) if values else None


def _median(values: Mapping[int, float]) -> float | None:
    return statistics.median(values.values()) if values else None


def _whole(run: RunRecord | None, *path: str) -> int | None:
    value = run.number(*path) if run is not None else None
    return None if value is None else round(value)
