"""Diffusion of deep matching: how widely a head's queries and keys spread over the features of their partners, and
how well the right partner stands out. Definitions and their reasons: docs/diffusion.md.

Needs a run on the controlled language, whose words carry their features, heads and partners. Every number is a
function of scores alone: multiplying queries by any matrix and keys by its inverse changes none of them, for that
changes nothing a model computes. Places and questions are those of `affinity`. Nothing here intervenes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..data.synthetic.controlled import ControlledSpec, Sentence
from .affinity import PLACES, Floats, Place, Question, View, identity, open_run, questions, watched
from .diffusion_features import GROUPS, Decomposition, sides

HALVES = ("choose", "report")
"""Sentences of even and of odd number: a best head is chosen on the first and reported on the second."""

TINY = 1e-38
"""Weights below are no longer told apart: the kernel works in float32."""


def measure(path: Path, *, sentences: int = 500, checkpoint: Literal["best", "last"] = "best") -> dict[str, Any]:
    """All measures of one run in JSON's types; see docs/diffusion.md.

    sentences: at most so many validation sentences, evenly spaced.
    Raises UserError if the run did not translate the controlled language.
    """
    model, recipe, tokenizers = open_run(path, checkpoint)
    spec = recipe.data.controlled or ControlledSpec()
    samples = {place: Sample() for place in PLACES}
    used = 0
    for sentence, views in watched(model, recipe, tokenizers, sentences):
        for place in PLACES:
            samples[place].add(sentence, views[place], place, spec, HALVES[used % 2])
        used += 1
    return {
        **identity(path, model, recipe),
        "sentences": used,
        "groups": list(GROUPS),
        "matched_side": {place: samples[place].matched_side for place in PLACES},
        "places": {place: samples[place].result() for place in PLACES},
    }


# -- collecting --------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """Queries and keys of one place over all sentences, with the features of their words."""

    query_rows: list[tuple[Any, ...]] = field(default_factory=list)
    key_rows: list[tuple[Any, ...]] = field(default_factory=list)
    queries: list[Floats] = field(default_factory=list)
    keys: list[Floats] = field(default_factory=list)
    columns: Any = 0.0
    asked: int = 0
    scale: float = 1.0
    keys_are_values: bool = False
    separations: dict[tuple[str, str], Separation] = field(default_factory=dict)

    def add(self, sentence: Sentence, view: View, place: Place, spec: ControlledSpec, half: str) -> None:
        source, target = sides(sentence, spec)
        asking = source if place == "encoder" else target
        asked = target if place == "decoder" else source
        first = 1 if place == "decoder" else 0  # the start token is no word
        words = min(len(asked), view.keys.shape[2] - first)
        self.keys_are_values, self.scale = view.keys_are_values, view.scale
        self.query_rows += asking
        self.queries.append(view.queries[:, :, : len(asking)])
        self.key_rows += asked[:words]
        self.keys.append(view.keys[:, :, first : first + words])
        for question in questions(sentence, place):
            weights = view.weights[:, :, question.row, : len(question.column_class)]
            self._add_question(question, weights, half)

    def _add_question(self, question: Question, weights: Floats, half: str) -> None:
        self.asked += 1
        self.columns = self.columns + np.exp(-(weights * np.log(np.maximum(weights, TINY))).sum(axis=-1))
        for relation, right in question.wanted.items():
            others = [c for c, kind in enumerate(question.column_class) if kind >= 0 and c not in right]
            if right and others:
                classes = {question.column_class[c] for c in right}
                rivals = [c for c in others if question.column_class[c] in classes]
                one = self.separations.setdefault((relation, half), Separation())
                one.add(weights, right, others, rivals)

    @property
    def matched_side(self) -> str:
        """Who has to carry the match: the query, where what it meets is the value itself, else the key."""
        return "query" if self.keys_are_values else "key"

    def result(self) -> dict[str, Any]:
        """Per head, in JSON's types."""
        queries, keys = np.concatenate(self.queries, axis=2), np.concatenate(self.keys, axis=2)
        by_key, by_query = Decomposition(self.key_rows), Decomposition(self.query_rows)
        words = [row[GROUPS.index("word")] for row in self.key_rows]
        heads = []
        for layer, head in np.ndindex(*queries.shape[:2]):
            q, k = queries[layer, head], keys[layer, head]
            sides = {
                "query": spread(q, by_key.covariances(k)),
                "key": spread(k - k.mean(axis=0), by_query.covariances(q)),
            }
            heads.append(
                {
                    "layer": layer,
                    "index": head,
                    **sides,
                    "matched": {name: sides[self.matched_side][name] for name in ("groups", "rank")},
                    "words_asked_for": words_asked_for(q, k, words, self.scale),
                    "columns_attended": float(self.columns[layer, head]) / self.asked,
                    "separation": self._separation(layer, head),
                }
            )
        return {"queries": len(self.query_rows), "keys": len(self.key_rows), "heads": heads}

    def _separation(self, layer: int, head: int) -> dict[str, dict[str, dict[str, float | int | None]]]:
        found: dict[str, dict[str, Any]] = {}
        for (relation, half), one in self.separations.items():
            found.setdefault(relation, {})[half] = one.of(layer, head)
        return found


# -- how widely vectors spread -----------------------------------------------------------------------------------


def spread(matched: Floats, partners: Floats) -> dict[str, Any]:
    """How the scores of matched vectors (N, D) spread over the feature groups of their partners.

    partners: (groups, D, D), the covariance of the partner vectors that each group explains, `rest` last.
    shares: mean over vectors of the share of their score variance that each group makes.
    groups: exp of the mean entropy of those shares: how many groups a vector answers to, from 1.
    rank: effective rank (Roy and Vetterli 2007) of the scores against partners as their features explain them.
    """
    made = np.maximum(np.einsum("nd,gde,ne->ng", matched, partners, matched), 0.0)
    shares = made / np.maximum(made.sum(axis=1, keepdims=True), 1e-300)
    entropy = -(shares * np.log(np.maximum(shares, 1e-300))).sum(axis=1)
    moment = matched.T @ matched / len(matched)
    explained = partners[:-1].sum(axis=0)
    squares = np.linalg.eigvals(moment @ explained).real
    return {
        "shares": shares.mean(axis=0).tolist(),
        "groups": float(np.exp(entropy.mean())),
        "rank": effective_rank(np.sqrt(np.maximum(squares, 0.0))),
    }


def effective_rank(singular: Floats) -> float:
    """exp of the entropy of singular values as shares of their sum (Roy and Vetterli 2007); 0 if all are 0."""
    total = singular.sum()
    if total <= 0:
        return 0.0
    p = singular[singular > 0] / total
    return float(np.exp(-(p * np.log(p)).sum()))


def words_asked_for(queries: Floats, keys: Floats, words: Sequence[str], scale: float) -> float:
    """How many words a query asks for: exp of the mean entropy of its softmax over every word of the language, each by
    its mean key and standing there once, distance left out. scale: multiplies the product of query and key.

    queries (M, D), keys (N, D), words: of the keys.
    """
    names, codes = np.unique(words, return_inverse=True)
    sums = np.stack([np.bincount(codes, column, len(names)) for column in keys.T], axis=1)
    means = sums / np.bincount(codes)[:, None]
    scores = scale * queries @ means.T
    scores -= scores.max(axis=1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(axis=1, keepdims=True)
    return float(np.exp(-(weights * np.log(np.maximum(weights, TINY))).sum(axis=1).mean()))


# -- how well the right partner stands out -----------------------------------------------------------------------


@dataclass
class Separation:
    """Right columns against distractors, summed over queries, per layer and head `(L, H)`.

    Before the softmax: scores, known up to a constant per query, which none of these measures sees.
    """

    count: int = 0
    rival_count: int = 0
    sums: dict[str, Any] = field(default_factory=dict)

    def add(self, weights: Floats, right: list[int], others: list[int], rivals: list[int]) -> None:
        """weights: (L, H, T) of one query. rivals: those of the others that are of a right column's class."""
        scores = np.log(np.maximum(weights, TINY))
        scores = scores - scores[..., right + others].mean(axis=-1, keepdims=True)
        self.count += 1
        self._sum("auc", _auc(scores, right, others))
        if rivals:
            self.rival_count += 1
            self._sum("rival_auc", _auc(scores, right, rivals))
        for name, values in (("score", scores), ("weight", weights)):
            self._sum(f"{name}_margin", values[..., right].max(axis=-1) - values[..., others].max(axis=-1))
            for kind, columns in (("right", right), ("other", others)):
                self._sum(f"{name}_{kind}_n", len(columns))
                self._sum(f"{name}_{kind}_sum", values[..., columns].sum(axis=-1))
                self._sum(f"{name}_{kind}_squares", (values[..., columns] ** 2).sum(axis=-1))

    def _sum(self, name: str, value: Any) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def of(self, layer: int, head: int) -> dict[str, float | int | None]:
        """auc: chance that a right column scores above a distractor of its query (the softmax cannot change it);
        rival_auc: the same against words of the right word's class; margin: right less the strongest distractor;
        d_prime: distance of the means in standard deviations, scores centred per query.
        """

        def mean(name: str, count: int) -> float | None:
            return float(self.sums[name][layer, head]) / count if count else None

        return {
            "count": self.count,
            "auc": mean("auc", self.count),
            "rival_auc": mean("rival_auc", self.rival_count),
            "margin_before": mean("score_margin", self.count),
            "d_prime_before": self._d_prime("score", layer, head),
            "margin_after": mean("weight_margin", self.count),
            "d_prime_after": self._d_prime("weight", layer, head),
        }

    def _d_prime(self, name: str, layer: int, head: int) -> float | None:
        means, variances = [], []
        for kind in ("right", "other"):
            n = self.sums[f"{name}_{kind}_n"]
            mean = float(self.sums[f"{name}_{kind}_sum"][layer, head]) / n
            means.append(mean)
            variances.append(max(float(self.sums[f"{name}_{kind}_squares"][layer, head]) / n - mean**2, 0.0))
        deviation = np.sqrt(sum(variances) / 2)
        return float((means[0] - means[1]) / deviation) if deviation > 0 else None


def _auc(values: Floats, right: list[int], others: list[int]) -> Floats:
    """Share of (right, other) pairs in which the right one is larger, ties half; over the last axis."""
    difference = values[..., right, None] - values[..., None, others]
    won: Floats = ((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-2, -1))
    return won


def best_head(heads: Sequence[dict[str, Any]], relation: str) -> dict[str, Any] | None:
    """What the head of the highest AUC on the choosing half does on the reporting half; None where none was asked."""
    able = [h for h in heads if set(HALVES) <= h["separation"].get(relation, {}).keys()]
    if not able:
        return None
    chosen = max(able, key=lambda h: h["separation"][relation]["choose"]["auc"])
    reported: dict[str, Any] = chosen["separation"][relation]["report"]
    return reported
