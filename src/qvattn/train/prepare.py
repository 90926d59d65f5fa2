"""From a recipe to what the loop needs: tokenizers, encoded batches and an initialised (or restored) model.

Initial values and batch order depend on the seed only, never on the variant, so that comparisons are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..data import (
    BatchPlan,
    Corpus,
    ParallelDataset,
    TextCorpus,
    TextDataset,
    Tokenizers,
    build_text_tokenizer,
    build_tokenizers,
    load_corpus,
    load_text,
    word_tokenizer,
)
from ..data.synthetic.mqar import MqarSpec, make_mqar, mqar_words
from ..models import CausalLM, CausalLMConfig, QvattnModel, TranslationConfig, TranslationModel, initialise
from .checkpoint import MODEL_SHARDS, WEIGHTS, Checkpoint
from .encoded import (
    ENCODED,
    BlockData,
    Encoded,
    EncodedData,
    Notes,
    PairData,
    Pairs,
    read_encoded,
    write_encoded,
)
from .loop import Batch, TrainData
from .processes import Processes
from .recipe import Recipe
from .sharding import fill_divided, is_divided, read_shards, weights
from .streamed import write_streamed


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run ready to start; the pairs are those of a translation task, as text.

    `notes` are the corpus's counts, `variant` the attention spec of the decoder.
    """

    model: QvattnModel
    plan: BatchPlan
    train: TrainData
    valid: list[Batch]
    test: list[Batch]
    tokenizers: Tokenizers
    notes: Notes
    variant: dict[str, Any]
    valid_pairs: Pairs = ()
    test_pairs: Pairs = ()


def prepare(
    recipe: Recipe, run_dir: Path, checkpoint: Checkpoint | None, processes: Processes | None = None
) -> Prepared:
    """Data and model of a run; with a checkpoint, its weights and the run's saved tokenizer.

    processes: they call this together; the main one encodes, the others map what it has written to `run_dir`.
    """
    saved = Tokenizers.load(run_dir) if checkpoint else None
    encoded = _encode_for(recipe, run_dir, saved, processes)
    model = build_model(recipe, encoded.tokenizers)
    if checkpoint is None:
        initialise(model, recipe.train.seed)
    else:
        model = load_model(model, checkpoint.path)
    return Prepared(
        model=model,
        plan=BatchPlan(encoded.train.lengths, max_tokens=recipe.data.max_tokens, seed=recipe.train.seed),
        train=encoded.train,
        valid=_batches(encoded.valid, recipe),
        test=_batches(encoded.test, recipe) if encoded.test is not None else [],
        tokenizers=encoded.tokenizers,
        notes=encoded.notes,
        variant=model.attention_spec.model_dump(mode="json", exclude_none=True),
        valid_pairs=encoded.valid_pairs,
        test_pairs=encoded.test_pairs,
    )


def _encode_for(
    recipe: Recipe, run_dir: Path, tokenizers: Tokenizers | None, processes: Processes | None
) -> EncodedData:
    """Encoded once, by the main process; what is streamed is never in memory, nor is what several processes share."""
    folder = run_dir / ENCODED
    streamed = recipe.data.hub is not None and recipe.data.hub.streaming
    if processes is None or recipe.data.corpus == "mqar" or (processes.count == 1 and not streamed):
        return encode(recipe, tokenizers)
    with processes.together():
        if processes.is_main and streamed:
            write_streamed(folder, recipe.data, tokenizers)
        elif processes.is_main:
            write_encoded(folder, encode(recipe, tokenizers))
    return read_encoded(folder)


def encode(recipe: Recipe, tokenizers: Tokenizers | None = None) -> EncodedData:
    """Load the corpus, train the tokenizers (unless given) on its training split, and encode every split."""
    if recipe.data.corpus == "mqar":
        return _make_recall(recipe)
    return (_encode_pairs if recipe.task == "translation" else _encode_text)(recipe, tokenizers)


def build_model(recipe: Recipe, tokenizers: Tokenizers) -> QvattnModel:
    """The recipe's model for these vocabularies, not yet initialised."""
    return model_for(recipe, len(tokenizers.source), len(tokenizers.target))


def model_for(recipe: Recipe, source_vocab_size: int, target_vocab_size: int) -> QvattnModel:
    """The recipe's model for these vocabulary sizes (a language model uses the target's), not yet initialised."""
    spec = recipe.model.model_dump()
    if recipe.task == "translation":
        return TranslationModel(
            TranslationConfig(source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size, **spec)
        )
    spec["layers"] = spec.pop("decoder_layers")
    del spec["encoder_layers"], spec["share_embeddings"]
    return CausalLM(CausalLMConfig(vocab_size=target_vocab_size, **spec))


def load_model(like: QvattnModel, path: Path) -> QvattnModel:
    """The model saved at `path`, of the same class as `like`, in fp32; missing or unexpected weights are errors.

    Of a checkpoint in shards it is `like` itself, filled.
    """
    if (path / MODEL_SHARDS).is_dir():
        read_shards(path / MODEL_SHARDS, weights(like))
        return like
    loaded: QvattnModel = type(like).from_pretrained(path, dtype=next(like.parameters()).dtype)
    return loaded


def load_weights(model: QvattnModel, path: Path) -> None:
    """The weights saved at `path`, sharded or not, into a model that is divided or not; all processes call it."""
    if (path / MODEL_SHARDS).is_dir():
        read_shards(path / MODEL_SHARDS, weights(model))
    elif is_divided(model):
        fill_divided(model, load_file(path / WEIGHTS))
    else:
        model.load_state_dict(load_model(model, path).state_dict())


def _encode_pairs(recipe: Recipe, tokenizers: Tokenizers | None) -> EncodedData:
    corpus: Corpus = load_corpus(recipe.data)
    tokenizers = tokenizers or build_tokenizers(corpus.train, recipe.data)
    notes: Notes = {"corpus": corpus.name, **corpus.notes}

    def split(name: str, pairs: Sequence[tuple[str, str]]) -> PairData:
        dataset = ParallelDataset.encode(pairs, tokenizers, recipe.data.max_length, f"data: {name} split")
        notes.update({f"{name}_dropped_{reason}": count for reason, count in dataset.dropped.items() if count})
        return PairData(dataset)

    encoded = _splits(corpus, split, tokenizers, notes)
    return replace(encoded, valid_pairs=corpus.valid, test_pairs=corpus.test)


def _encode_text(recipe: Recipe, tokenizers: Tokenizers | None) -> EncodedData:
    corpus: TextCorpus = load_text(recipe.data)
    if tokenizers is None:
        tokenizer = build_text_tokenizer(corpus.train, recipe.data)
        tokenizers = Tokenizers(tokenizer, tokenizer)
    vocabulary = tokenizers.target
    notes: Notes = {"corpus": corpus.name, **corpus.notes}

    def split(name: str, documents: Sequence[str]) -> BlockData:
        dataset = TextDataset.encode(documents, vocabulary, recipe.data.block_size, f"data: {name} split")
        notes[f"{name}_dropped_tokens"] = dataset.dropped_tokens
        return BlockData(dataset)

    return _splits(corpus, split, tokenizers, notes)


def _make_recall(recipe: Recipe) -> EncodedData:
    spec = recipe.data.mqar or MqarSpec()
    tokenizer = word_tokenizer(mqar_words(spec))
    length = recipe.data.block_size
    return EncodedData(
        tokenizers=Tokenizers(tokenizer, tokenizer),
        train=make_mqar(spec, length, "train"),
        valid=make_mqar(spec, length, "valid"),
        test=make_mqar(spec, length, "test") if spec.test else None,
        notes={"corpus": "multi-query associative recall", "train_rows": spec.train, "valid_rows": spec.valid},
    )


def _splits(
    corpus: Corpus | TextCorpus,
    split: Callable[[str, Any], PairData | BlockData],
    tokenizers: Tokenizers,
    notes: Notes,
) -> EncodedData:
    return EncodedData(
        tokenizers=tokenizers,
        train=split("train", corpus.train),
        valid=split("valid", corpus.valid),
        test=split("test", corpus.test) if corpus.test else None,
        notes=notes,
    )


def _batches(data: Encoded, recipe: Recipe) -> list[Batch]:
    """All of a held-out split, collated once."""
    plan = BatchPlan(data.lengths, max_tokens=recipe.data.max_tokens, seed=0)
    return [data.collate(indices) for indices in plan.epoch(0)]
