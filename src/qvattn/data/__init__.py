"""Corpora, tokenizer and batches: everything between a file and a tensor.

`load_corpus` -> `build_tokenizers` -> `ParallelDataset.encode` -> `BatchPlan` -> `collate`.
No module here knows a model or a variant, so all variants are fed the same batches in the same order.
"""

from .batching import BatchPlan, shard
from .corpus import Corpus, load_corpus
from .parallel import IGNORED_LABEL, ParallelDataset, collate
from .spec import DataSpec, HubSpec
from .text import TextCorpus, TextDataset, build_text_tokenizer, collate_text, load_text
from .tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizers, build_tokenizers, load_tokenizer, word_tokenizer

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "IGNORED_LABEL",
    "PAD_ID",
    "UNK_ID",
    "BatchPlan",
    "Corpus",
    "DataSpec",
    "HubSpec",
    "ParallelDataset",
    "TextCorpus",
    "TextDataset",
    "Tokenizers",
    "build_text_tokenizer",
    "build_tokenizers",
    "collate",
    "collate_text",
    "load_corpus",
    "load_text",
    "load_tokenizer",
    "shard",
    "word_tokenizer",
]
