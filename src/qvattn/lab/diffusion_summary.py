"""Diffusion over the runs of a comparison: means over seeds, differences paired by seed, and what was predicted.

The predictions are those of the published explanation of why QKV does better than QV (arXiv 2603.15665), put into the
measures of docs/diffusion.md. A verdict is given only where an interval leaves out zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from ..errors import UserError
from .affinity import PLACES, RELATIONS
from .diffusion import HALVES, best_head
from .statistics import Estimate, estimate, paired_difference

Run = dict[str, Any]
Measure = Callable[[Run], float | None]

SPREAD: dict[str, Callable[[dict[str, Any]], float]] = {
    "query groups": lambda head: head["query"]["groups"],
    "query rank": lambda head: head["query"]["rank"],
    "words asked for": lambda head: head["words_asked_for"],
    "columns attended": lambda head: head["columns_attended"],
    "key groups": lambda head: head["key"]["groups"],
    "key rank": lambda head: head["key"]["rank"],
    "matched groups": lambda head: head["matched"]["groups"],
    "matched rank": lambda head: head["matched"]["rank"],
}
SEPARATION = ("auc", "rival_auc", "margin_before", "d_prime_before", "margin_after", "d_prime_after")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measure of one variant. relation: None where it is a mean over all heads of the place.

    difference: to the baseline, paired by seed; None for the baseline itself.
    """

    name: str
    place: str
    relation: str | None
    measure: str
    value: Estimate
    difference: Estimate | None

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            **asdict(self),
            **{k: v and v.model_dump() for k, v in (("value", self.value), ("difference", self.difference))},
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was predicted of a variant, what was found, and whether it came so: "yes", "the opposite", "open"."""

    name: str
    prediction: str
    measure: str
    found: Estimate | None
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {**asdict(self), "found": self.found and self.found.model_dump()}


def lines(runs: Sequence[Run], baseline: str) -> list[Line]:
    """Every measure by variant, place and relation; runs that share a name are seeds of one variant."""
    found = []
    for place in PLACES:
        for relation, measures in _measures(place).items():
            for measure, of in measures.items():
                base = _by_seed(runs, baseline, of)
                for name in names(runs):
                    values = _by_seed(runs, name, of)
                    if values:
                        found.append(
                            Line(
                                name=name,
                                place=place,
                                relation=relation,
                                measure=measure,
                                value=estimate(list(values.values())),
                                difference=None if name == baseline else paired_difference(values, base),
                            )
                        )
    return found


def names(runs: Sequence[Run]) -> list[str]:
    """The variants, in the order of the runs."""
    return list(dict.fromkeys(run["name"] for run in runs))


def choose_baseline(runs: Sequence[Run], wanted: str | None) -> str:
    """The variant that differences are taken to: the wanted one, or the first whose keys are not its values.

    Raises UserError if no run has the wanted name.
    """
    found = names(runs)
    if wanted is not None:
        if wanted not in found:
            raise UserError(f"--baseline {wanted!r} is not a variant; allowed: {', '.join(found)}")
        return wanted
    return next((run["name"] for run in runs if not _matches_on_queries(run)), found[0])


def _matches_on_queries(run: Run) -> bool:
    """Whether the queries have to do the matching, because what they meet is the value itself."""
    return all(side == "query" for side in run["matched_side"].values())


def _measures(place: str) -> Mapping[str | None, Mapping[str, Measure]]:
    measures: dict[str | None, dict[str, Measure]] = {
        None: {m: _mean_over_heads(of, (place,)) for m, of in SPREAD.items()}
    }
    for relation in RELATIONS:
        measures[relation] = {name: _best_of(place, relation, name) for name in SEPARATION}
    return measures


def _mean_over_heads(of: Callable[[dict[str, Any]], float], places: Sequence[str]) -> Measure:
    return lambda run: float(np.mean([of(head) for place in places for head in run["places"][place]["heads"]]))


def _best_of(place: str, relation: str, name: str) -> Measure:
    def of(run: Run) -> float | None:
        best = best_head(run["places"][place]["heads"], relation)
        return None if best is None else best[name]

    return of


def _by_seed(runs: Sequence[Run], name: str, of: Measure) -> dict[int, float]:
    return {run["seed"]: value for run in runs if run["name"] == name and (value := of(run)) is not None}


# -- predictions -------------------------------------------------------------------------------------------------


def predictions(runs: Sequence[Run], baseline: str) -> list[Verdict]:
    """For every variant whose queries do the matching: what the explanation predicts against the baseline, and for all
    variants whether, head by head, the more diffuse query separates less well.
    """
    found = []
    for name in names(runs):
        group = [run for run in runs if run["name"] == name]
        if name != baseline and _matches_on_queries(group[0]):
            found += [_compared(runs, name, baseline, *one) for one in _COMPARED]
            found += _nearer(runs, name, baseline)
    for name in names(runs):
        for measure, of in (("query groups", SPREAD["query groups"]), ("query rank", SPREAD["query rank"])):
            values = [r for run in runs if run["name"] == name and (r := _rank_correlation(run, of)) is not None]
            found.append(
                _judged(
                    name,
                    "heads with a more diffuse query separate less well",
                    f"rank correlation over heads, {measure} and AUC",
                    estimate(values) if values else None,
                    -1,
                )
            )
    return found


def _overall(measure: str) -> Measure:
    return _mean_over_heads(SPREAD[measure], PLACES)


def _separation_overall(measure: str) -> Measure:
    """Mean over all places and relations of what the best head does."""

    def of(run: Run) -> float | None:
        values = [_best_of(place, relation, measure)(run) for place in PLACES for relation in RELATIONS]
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    return of


_COMPARED: tuple[tuple[str, str, Measure, int], ...] = (
    ("queries are more diffuse", "query groups", _overall("query groups"), 1),
    ("queries are more diffuse", "query rank", _overall("query rank"), 1),
    ("queries are more diffuse", "words asked for", _overall("words asked for"), 1),
    ("keys are less diffuse", "key groups", _overall("key groups"), -1),
    ("keys are less diffuse", "key rank", _overall("key rank"), -1),
    ("the right partner stands out less", "AUC", _separation_overall("auc"), -1),
    ("the right partner stands out less", "AUC, same class", _separation_overall("rival_auc"), -1),
    ("the right partner stands out less", "d' before the softmax", _separation_overall("d_prime_before"), -1),
    ("the right partner stands out less", "margin after the softmax", _separation_overall("margin_after"), -1),
    ("attention is less focused", "columns attended", _overall("columns attended"), 1),
)


def _compared(
    runs: Sequence[Run], name: str, baseline: str, prediction: str, label: str, of: Measure, sign: int
) -> Verdict:
    difference = paired_difference(_by_seed(runs, name, of), _by_seed(runs, baseline, of))
    return _judged(name, f"{prediction} than in {baseline}", label, difference, sign)


def _nearer(runs: Sequence[Run], name: str, baseline: str) -> list[Verdict]:
    """Whether variants that make keys again have less diffuse queries than this one."""
    found = []
    for other in names(runs):
        group = [run for run in runs if run["name"] == other]
        if other in (name, baseline) or _matches_on_queries(group[0]):
            continue
        for label in ("query groups", "query rank"):
            of = _overall(label)
            difference = paired_difference(_by_seed(runs, other, of), _by_seed(runs, name, of))
            found.append(_judged(other, f"queries are less diffuse than in {name}", label, difference, -1))
    return found


def _judged(name: str, prediction: str, measure: str, found: Estimate | None, sign: int) -> Verdict:
    verdict = "open"
    if found is not None and found.excludes_zero:
        verdict = "yes" if found.mean * sign > 0 else "the opposite"
    return Verdict(name=name, prediction=prediction, measure=measure, found=found, verdict=verdict)


def _rank_correlation(run: Run, of: Callable[[dict[str, Any]], float]) -> float | None:
    """Spearman's, over the heads of a place, with the AUC of what each head separates best; mean over places."""
    found = []
    for place in PLACES:
        heads = run["places"][place]["heads"]
        pairs = [(of(head), auc) for head in heads if (auc := _own_best(head)) is not None]
        if len(pairs) > 2:
            value = float(spearmanr(*zip(*pairs, strict=True)).statistic)
            if value == value:
                found.append(value)
    return float(np.mean(found)) if found else None


def _own_best(head: dict[str, Any]) -> float | None:
    """AUC on the reporting half of the relation that the head separates best on the choosing half."""
    able = [one for one in head["separation"].values() if set(HALVES) <= one.keys()]
    if not able:
        return None
    value: float = max(able, key=lambda one: one["choose"]["auc"])["report"]["auc"]
    return value


def results(runs: Sequence[Run], baseline: str) -> dict[str, Any]:
    """Everything in JSON's types: runs as measured, lines by variant, predictions."""
    return {
        "baseline": baseline,
        "predictions": [one.as_dict() for one in predictions(runs, baseline)],
        "summary": [line.as_dict() for line in lines(runs, baseline)],
        "runs": list(runs),
    }
