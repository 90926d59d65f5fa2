"""From a path to a subject: the model of a run, or a saved one, with sentences of the run's held-out data or of files.

Reads only. Sentences are spread evenly over the data, so no random state decides which are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from ...data import ParallelDataset, TextDataset, Tokenizers, load_corpus, load_text
from ...data.corpus import evenly
from ...data.lines import read_lines
from ...errors import UserError
from ...models import CausalLM, QvattnModel, TranslationModel
from ...train.checkpoint import find_checkpoint
from ...train.recipe import Recipe, read_recipe
from ...untrusted import parse_json
from .subject import SHORTEST, Sample, Subject

CLASSES: dict[str, type[QvattnModel]] = {m.config_class.model_type: m for m in (TranslationModel, CausalLM)}
ENOUGH = 12
"""Tokens from which a sentence is taken before shorter ones."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Files that take the place of the run's own data."""

    source: Path | None = None
    target: Path | None = None
    text: Path | None = None

    @property
    def given(self) -> bool:
        return any((self.source, self.target, self.text))


def load_subject(
    path: Path,
    *,
    texts: Texts | None = None,
    sentences: int = 16,
    length: int = 64,
    seed: int = 1,
    checkpoint: Literal["best", "last"] = "best",
    device: str = "cpu",
) -> Subject:
    """A run directory, one of its checkpoints, or a saved model with its tokenizer, in float32.

    texts: real text to use; needed where there is no run whose validation data could be read.
    sentences: how many.  length: the most tokens of one.
    Raises UserError for a path that holds no model, and for texts that do not fit the model or are missing.
    """
    run = find_run(path)
    folder = find_checkpoint(path, checkpoint) if run == path else path
    model = load(folder).to(device)
    tokenizers = tokenizers_beside(run or folder)
    texts = texts or Texts()
    _check_fit(model, texts)
    recipe = None
    if not texts.given:
        if run is None:
            wanted = "--source and --target" if isinstance(model, TranslationModel) else "--text"
            raise UserError(f"{path} is not part of a run, so there is no validation data: give {wanted}")
        recipe = read_recipe((run / "recipe.yaml").read_text(encoding="utf-8"), origin=str(run / "recipe.yaml"))
    if isinstance(model, TranslationModel):
        samples = _pairs(texts, recipe, tokenizers, sentences, length)
    else:
        samples = _blocks(texts, recipe, tokenizers, sentences, length)
    moved = [Sample(ids=s.ids.to(device), source=None if s.source is None else s.source.to(device)) for s in samples]
    data = "the run's validation data" if recipe else ", ".join(str(p) for p in vars(texts).values() if p)
    return Subject(model=model, samples=moved, name=str(path), data=data, seed=seed)


def tokenizers_beside(folder: Path) -> Tokenizers:
    """Those of a run, or the one that transformers saved beside an adopted or converted model."""
    if not (folder / "tokenizer_config.json").is_file():
        return Tokenizers.load(folder)
    try:
        words = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: its tokenizer cannot be loaded ({' '.join(str(error).split())[:200]})") from None
    return Tokenizers(words, words)


def find_run(path: Path) -> Path | None:
    """The run directory that `path` is or lies in (a checkpoint of it)."""
    places = (path, *list(path.resolve().parents)[:2])
    return next((p for p in places if (p / "recipe.yaml").is_file() and (p / "checkpoints").is_dir()), None)


def load(folder: Path) -> QvattnModel:
    """The saved model in `folder`, whichever of ours it is, in float32."""
    try:
        kind = parse_json((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder} holds neither a run nor a saved model: config.json: {error}") from None
    if not isinstance(kind, str) or kind not in CLASSES:
        raise UserError(f"{folder}: model_type={kind!r}: allowed are {', '.join(CLASSES)}")
    transformers_logging.disable_progress_bar()
    model: QvattnModel = CLASSES[kind].from_pretrained(folder, dtype=torch.float32)
    return model


def _check_fit(model: QvattnModel, texts: Texts) -> None:
    if isinstance(model, TranslationModel):
        if texts.text or bool(texts.source) != bool(texts.target):
            raise UserError("a translation model needs both --source and --target, aligned line by line, and no --text")
    elif texts.source or texts.target:
        raise UserError("a language model has no source: give --text")


def _pairs(texts: Texts, recipe: Recipe | None, tokenizers: Tokenizers, sentences: int, length: int) -> list[Sample]:
    if texts.source and texts.target:
        sides = [read_lines(texts.source, "--source"), read_lines(texts.target, "--target")]
        if len(sides[0]) != len(sides[1]):
            raise UserError(f"--source has {len(sides[0])} lines, --target {len(sides[1])}: they must be aligned")
        pairs = list(zip(*sides, strict=True))
    else:
        assert recipe is not None
        pairs = load_corpus(recipe.data).valid
    pairs = evenly(pairs, max(200, 8 * sentences))
    dataset = ParallelDataset.encode(pairs, tokenizers, max_length=length, name="check")
    return [
        Sample(ids=batch["decoder_input_ids"], source=batch["input_ids"])
        for i in _chosen(list(dataset.target.lengths), sentences)
        for batch in [dataset.collate([i])]
    ]


def _blocks(texts: Texts, recipe: Recipe | None, tokenizers: Tokenizers, sentences: int, length: int) -> list[Sample]:
    if texts.text:
        documents = read_lines(texts.text, "--text")
    else:
        assert recipe is not None
        documents = load_text(recipe.data).valid
        length = min(length, recipe.data.block_size)
    dataset = TextDataset.encode(documents, tokenizers.target, length, name="check")
    return [Sample(ids=dataset.collate([i])["input_ids"]) for i in evenly(list(range(len(dataset))), sentences)]


def _chosen(lengths: Sequence[int], sentences: int) -> list[int]:
    """Rows spread evenly over those with enough tokens, filled up with shorter ones."""
    enough = [i for i, n in enumerate(lengths) if n >= ENOUGH]
    shorter = sorted((i for i, n in enumerate(lengths) if SHORTEST <= n < ENOUGH), key=lambda i: -lengths[i])
    chosen = evenly(enough, sentences)
    return [*chosen, *shorter[: sentences - len(chosen)]]
