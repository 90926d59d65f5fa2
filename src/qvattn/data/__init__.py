"""Corpora, tokenizer and batches: everything between a file and a tensor.

`load_corpus` -> `build_tokenizers` -> `ParallelDataset.encode` -> `BatchPlan` -> `collate`.
No module here knows a model or a variant, so all variants are fed the same batches in the same order.
"""

from qvattn.data.batching import BatchPlan, shard
from qvattn.data.corpus import Corpus, load_corpus
from qvattn.data.parallel import IGNORED_LABEL, ParallelDataset, collate
from qvattn.data.spec import DataSpec, HubSpec
from qvattn.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizers, build_tokenizers, load_tokenizer

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
    "Tokenizers",
    "build_tokenizers",
    "collate",
    "load_corpus",
    "load_tokenizer",
    "shard",
]
