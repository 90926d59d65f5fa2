"""Affinity: what each head of a trained translation model attends to, held against a grammar that is known.

Needs a run on the controlled language, whose words carry their class, their head and their partner. Attention is
teacher-forced on validation sentences, from the reference kernel, and asked about in three places:

    encoder   query: a source word; columns: source words
    decoder   query: the target word about to be written; columns: the target words read so far
    cross     query: the target word about to be written; columns: source words, by their partners in the target's tree

Mass is the share of a query's attention. `chance` is what uniform attention over all visible columns would give. What a
head attends to does not prove what it uses: nothing here intervenes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..attention import Attention
from ..data import BatchPlan, ParallelDataset, Tokenizers, load_corpus
from ..data.corpus import evenly
from ..data.synthetic.controlled import CLASSES, NO_HEAD, ControlledSpec, Sentence, Token, controlled_sentences
from ..errors import UserError
from ..kernels.terms import per_query_head
from ..models import TranslationModel
from ..spec import AttentionSpec
from ..train.checkpoint import find_checkpoint
from ..train.recipe import Recipe, read_recipe
from .check.loading import find_run, load
from .check.spying import Seen, spying
from .statistics import Estimate, estimate

Place = Literal["encoder", "decoder", "cross"]
PLACES: tuple[Place, ...] = ("encoder", "decoder", "cross")
RELATIONS = ("head", "modifiers", "partner")
"""What a query may look for: the word it modifies, the words that modify it, its translation (cross only)."""

ALL = "all"
BATCH_TOKENS = 2000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One query of one sentence: its columns by what they are.

    column_class: class index per visible column, -1 for columns that are no word.  wanted: relation -> columns.
    rivals: words of the head's class that are not the head, by whether they fit (the key) as the head might.
    """

    row: int
    word: Token
    column_class: npt.NDArray[np.int64]
    wanted: dict[str, list[int]]
    rivals: dict[bool, list[int]]


@dataclass
class Tally:
    """Sums over queries, per layer and head `(L, H)`."""

    count: int = 0
    mass: Any = 0.0
    squares: Any = 0.0
    hits: Any = 0.0
    chance: float = 0.0

    def add(self, mass: Floats, hits: npt.NDArray[np.bool_] | None, chance: float) -> None:
        self.count += 1
        self.mass = self.mass + mass
        self.squares = self.squares + mass**2
        self.chance += chance
        if hits is not None:
            self.hits = self.hits + hits

    def of(self, layer: int, head: int) -> dict[str, float | int]:
        """Averages of one head; accuracy: how often the heaviest column is a wanted one."""
        mean = float(self.mass[layer, head]) / self.count
        variance = max(float(self.squares[layer, head]) / self.count - mean**2, 0.0)
        return {
            "accuracy": float(np.asarray(self.hits)[layer, head]) / self.count if np.ndim(self.hits) else math.nan,
            "mass": mean,
            "standard_error": math.sqrt(variance / self.count),
            "chance": self.chance / self.count,
            "count": self.count,
        }


@dataclass
class PlaceTally:
    """Everything counted in one place."""

    table: Any = 0.0
    uniform: Floats = field(default_factory=lambda: np.zeros((len(CLASSES), len(CLASSES) + 1)))
    queries: Floats = field(default_factory=lambda: np.zeros(len(CLASSES)))
    relations: dict[tuple[str, str], Tally] = field(default_factory=dict)
    pairs: dict[tuple[str, bool], Tally] = field(default_factory=dict)

    def add(self, question: Question, weights: Floats) -> None:
        """weights: (L, H, T) of this query over its visible columns."""
        own = CLASSES.index(question.word.word_class)
        one_hot = np.eye(len(CLASSES) + 1)[question.column_class]  # -1 is the last column
        visible = len(question.column_class)
        row = np.zeros((*weights.shape[:2], len(CLASSES), len(CLASSES) + 1))
        row[:, :, own] = weights @ one_hot
        self.table = self.table + row
        self.uniform[own] += one_hot.mean(axis=0)
        self.queries[own] += 1
        heaviest = weights.argmax(axis=-1)
        for relation, columns in question.wanted.items():
            if columns:
                hits = np.isin(heaviest, columns)
                mass = weights[..., columns].sum(axis=-1)
                for key in (ALL, question.word.word_class):
                    tally = self.relations.setdefault((relation, key), Tally())
                    tally.add(mass, hits, len(columns) / visible)
        self._add_pairs(question, weights, visible)

    def _add_pairs(self, question: Question, weights: Floats, visible: int) -> None:
        fits, heads = question.word.fits, question.wanted["head"]
        if fits is None or not heads:
            return
        self.pairs.setdefault(("head", fits), Tally()).add(weights[..., heads[0]], None, 1 / visible)
        for fit, columns in question.rivals.items():
            for column in columns:
                self.pairs.setdefault(("rival", fit), Tally()).add(weights[..., column], None, 1 / visible)


def measure(path: Path, *, sentences: int = 500, checkpoint: Literal["best", "last"] = "best") -> dict[str, Any]:
    """All measures of one run in JSON's types; see the module.

    sentences: at most so many validation sentences, evenly spaced.
    Raises UserError if the run did not translate the controlled language.
    """
    model, recipe, tokenizers = open_run(path, checkpoint)
    tallies = {place: PlaceTally() for place in PLACES}
    used = 0
    for sentence, views in watched(model, recipe, tokenizers, sentences):
        used += 1
        for place in PLACES:
            for question in questions(sentence, place):
                visible = len(question.column_class)
                tallies[place].add(question, views[place].weights[:, :, question.row, :visible])
    return {**identity(path, model, recipe), **results(tallies, used)}


def results(tallies: dict[Place, PlaceTally], sentences: int) -> dict[str, Any]:
    """What was counted, in JSON's types."""
    return {
        "sentences": sentences,
        "classes": list(CLASSES),
        "places": {place: _place(tally) for place, tally in tallies.items()},
    }


def open_run(path: Path, checkpoint: Literal["best", "last"] = "best") -> tuple[TranslationModel, Recipe, Tokenizers]:
    """The model of a run on the controlled language, its recipe and its tokenizers.

    Raises UserError if `path` is no run, or its data is another.
    """
    return _opened(path, checkpoint, controlled=True)


def open_translation(
    path: Path, checkpoint: Literal["best", "last"] = "best"
) -> tuple[TranslationModel, Recipe, Tokenizers]:
    """The same for a run on any text. Raises UserError if `path` is no run, or its model does not translate."""
    return _opened(path, checkpoint, controlled=False)


def _opened(
    path: Path, checkpoint: Literal["best", "last"], *, controlled: bool
) -> tuple[TranslationModel, Recipe, Tokenizers]:
    run = find_run(path)
    if run is None:
        raise UserError(f"{path} is not a run directory: it needs recipe.yaml and checkpoints")
    recipe = read_recipe((run / "recipe.yaml").read_text(encoding="utf-8"), origin=str(run / "recipe.yaml"))
    if controlled and recipe.data.corpus != "controlled":
        raise UserError(
            f"{path}: data.corpus={recipe.data.corpus!r}: words with a known class and head are needed; "
            "train on corpus: controlled (recipe `controlled`)"
        )
    if recipe.task != "translation":
        raise UserError(f"{path}: task={recipe.task!r}: a run on translation is needed")
    model = load(find_checkpoint(run, checkpoint) if run == path else path)
    assert isinstance(model, TranslationModel)
    return model, recipe, Tokenizers.load(run)


def identity(path: Path, model: TranslationModel, recipe: Recipe) -> dict[str, Any]:
    """What tells one measured run from another, in JSON's types."""
    return {
        "run": path.name,
        "name": recipe.name,
        "seed": recipe.train.seed,
        "variant": model.attention_spec.model_dump(mode="json", exclude_none=True),
    }


@dataclass(frozen=True, kw_only=True)
class View:
    """One place of one sentence, padding cut off; D is the width of a query before anything is folded into it.

    weights: (L, H, M, T) after the softmax.  queries: (L, H, M, D).  keys: (L, H, T, D), as each query head meets them.
    scale: multiplies their product.  keys_are_values: whether what a query meets is the very stream that is summed.
    """

    weights: Floats
    queries: Floats
    keys: Floats
    scale: float
    keys_are_values: bool


def watched(
    model: TranslationModel, recipe: Recipe, tokenizers: Tokenizers, limit: int
) -> Iterator[tuple[Sentence, dict[Place, View]]]:
    """Validation sentences of the controlled language with what attention saw and did in each place."""
    spec = recipe.data.controlled or ControlledSpec()
    known = {sentence.pair: sentence for sentence in controlled_sentences(spec, "valid")}
    for pair, views in watched_pairs(model, recipe, tokenizers, limit):
        yield known[pair], views


def watched_pairs(
    model: TranslationModel, recipe: Recipe, tokenizers: Tokenizers, limit: int
) -> Iterator[tuple[tuple[str, str], dict[Place, View]]]:
    """Validation pairs as text, with what attention saw and did in each place."""
    pairs = evenly(load_corpus(recipe.data).valid, limit)
    data = ParallelDataset.encode(pairs, tokenizers, recipe.data.max_length, "validation split")
    model.eval()
    for indices in BatchPlan(data.lengths, max_tokens=max(BATCH_TOKENS, int(data.lengths.max())), seed=0).epoch(0):
        batch = _batch_views(model, data.collate(indices))
        for row, index in enumerate(indices):
            source, target = (int(n) for n in data.lengths[index])
            ends = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
            yield pairs[data.kept[index]], {p: _cut(batch[p], row, *ends[p]) for p in PLACES}


def _batch_views(model: TranslationModel, batch: dict[str, Tensor]) -> dict[Place, View]:
    """The three places of a batch, each array with the batch as a leading dimension."""
    with torch.inference_mode(), _keys_materialised(model), ExitStack() as spies:
        seen = {stack: spies.enter_context(spying(stack)) for stack in (model.encoder, model.decoder)}
        out = model(**batch, output_attentions=True)
    decoder = seen[model.decoder]
    return {
        "encoder": _view(out.encoder_attentions, seen[model.encoder], model.config.encoder_spec),
        "decoder": _view(out.decoder_attentions, [s for s in decoder if not s.cross], model.config.decoder_spec),
        "cross": _view(out.cross_attentions, [s for s in decoder if s.cross], model.config.cross_spec),
    }


@contextmanager
def _keys_materialised(model: TranslationModel) -> Iterator[None]:
    """Every attention by its `expand` route: keys and queries as the variant defines them, nothing folded."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    before = [layer.route for layer in layers]
    for layer in layers:
        layer.route = "expand"
    try:
        yield
    finally:
        for layer, route in zip(layers, before, strict=True):
            layer.route = route


def _view(weights: Sequence[Tensor], seen: Sequence[Seen], spec: AttentionSpec) -> View:
    terms = [one.terms[-1] for one in seen]
    queries = [torch.cat([term.q for term in one.scores], dim=-1) for one in terms]
    keys = [
        torch.cat([per_query_head(term.keys(), term.q.shape[1], term.groups) for term in one.scores], dim=-1)
        for one in terms
    ]
    if len({(one.shape[1], one.shape[-1]) for one in queries}) > 1:
        raise UserError("the model's layers differ in how many heads they have or how wide, so they fill no one table")
    return View(
        weights=torch.stack(list(weights), dim=1).double().numpy(),
        queries=torch.stack(queries, dim=1).double().numpy(),
        keys=torch.stack(keys, dim=1).double().numpy(),
        scale=spec.variant_class(spec).scale,
        keys_are_values=all(term.stream is one.value.stream for one in terms for term in one.scores),
    )


def _cut(batch: View, row: int, queries: int, columns: int) -> View:
    return View(
        weights=batch.weights[row, :, :, :queries, :columns],
        queries=batch.queries[row, :, :, :queries],
        keys=batch.keys[row, :, :, :columns],
        scale=batch.scale,
        keys_are_values=batch.keys_are_values,
    )


def questions(sentence: Sentence, place: Place) -> Iterator[Question]:
    """Every word of the querying side as a question about columns; see the module for what stands where."""
    asking = sentence.source if place == "encoder" else sentence.target
    asked = sentence.target if place == "decoder" else sentence.source
    modifiers: dict[int, list[int]] = {}
    for i, word in enumerate(asking):
        modifiers.setdefault(word.head, []).append(i)
    for row, word in enumerate(asking):
        # a decoder row reads the start token, then the words before the one it writes
        columns = [None, *asked[:row]] if place == "decoder" else [*asked, None]

        def column(index: int, row: int = row) -> list[int]:
            """Where word `index` of the asking side stands among the columns; nowhere, if not yet written."""
            if index == NO_HEAD:
                return []
            if place == "cross":
                return [asking[index].aligned]
            return [index] if place == "encoder" else [index + 1] * (index < row)

        wanted = {
            "head": column(word.head),
            "modifiers": [c for i in modifiers.get(row, ()) for c in column(i)],
        }
        if place == "cross":
            wanted["partner"] = [word.aligned]
        yield Question(
            row=row,
            word=word,
            column_class=np.array([-1 if c is None else CLASSES.index(c.word_class) for c in columns]),
            wanted=wanted,
            rivals=_rivals(word, wanted["head"], columns),
        )


def _rivals(word: Token, heads: list[int], columns: Sequence[Token | None]) -> dict[bool, list[int]]:
    found: dict[bool, list[int]] = {True: [], False: []}
    head = columns[heads[0]] if heads else None
    if head is not None:
        for i, other in enumerate(columns):
            if other is not None and i != heads[0] and other.word_class == head.word_class:
                found[other.group == word.group].append(i)
    return found


def _place(tally: PlaceTally) -> dict[str, Any]:
    queries = np.maximum(tally.queries, 1)[:, None]
    table = tally.table / queries
    layers, heads = table.shape[:2]
    return {
        "uniform_table": (tally.uniform / queries).tolist(),
        "queries": tally.queries.astype(int).tolist(),
        "heads": [_head(tally, table[i, h], i, h) for i in range(layers) for h in range(heads)],
    }


def _head(tally: PlaceTally, table: Floats, layer: int, head: int) -> dict[str, Any]:
    relations: dict[str, dict[str, Any]] = {}
    for (relation, key), one in sorted(tally.relations.items()):
        relations.setdefault(relation, {})[key] = one.of(layer, head)
    names = {True: "fits", False: "misfits"}
    pairs = {f"{kind} {names[fits]}": one.of(layer, head) for (kind, fits), one in sorted(tally.pairs.items())}
    for numbers in pairs.values():
        del numbers["accuracy"]  # asked of relations only
    return {"layer": layer, "index": head, "table": table.tolist(), **relations, "pairs": pairs}


# -- several runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Line:
    """One variant in one place over its seeds: the head that finds the most, and the average head."""

    name: str
    place: Place
    relation: str
    best_accuracy: Estimate
    best_mass: Estimate
    mean_mass: Estimate
    chance: float
    fit_effect: Estimate | None


def summary(runs: Sequence[dict[str, Any]]) -> list[Line]:
    """Per variant, place and relation over the runs that share a name (seeds).

    The best head is the one of highest accuracy on the sentences it is reported on. fit_effect: mass on the head word
    where the modifier fits, less where it does not, averaged over the heads of the place.
    """
    lines = []
    for name in dict.fromkeys(run["name"] for run in runs):
        group = [run["places"] for run in runs if run["name"] == name]
        for place in PLACES:
            for relation in RELATIONS:
                heads = [[head for head in places[place]["heads"] if relation in head] for places in group]
                if all(heads):
                    lines.append(_line(name, place, relation, heads))
    return lines


def _line(name: str, place: Place, relation: str, runs: list[list[dict[str, Any]]]) -> Line:
    best = [max((head[relation][ALL] for head in heads), key=lambda one: one["accuracy"]) for heads in runs]
    effects = [_fit_effect(heads) for heads in runs] if relation == "head" else []
    return Line(
        name=name,
        place=place,
        relation=relation,
        best_accuracy=estimate([one["accuracy"] for one in best]),
        best_mass=estimate([one["mass"] for one in best]),
        mean_mass=estimate([float(np.mean([head[relation][ALL]["mass"] for head in heads])) for heads in runs]),
        chance=runs[0][0][relation][ALL]["chance"],
        fit_effect=estimate([e for e in effects if e is not None]) if effects and None not in effects else None,
    )


def _fit_effect(heads: list[dict[str, Any]]) -> float | None:
    pairs = [head["pairs"] for head in heads]
    if not all({"head fits", "head misfits"} <= pair.keys() for pair in pairs):
        return None
    return float(np.mean([pair["head fits"]["mass"] - pair["head misfits"]["mass"] for pair in pairs]))
