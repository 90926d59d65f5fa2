"""BLEU and chrF of a translation model, with the signatures that make the numbers comparable (sacrebleu)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UserError
from ..models import QvattnModel
from .session import LeanModel
from .text import Search, TokenizerPair, translate_lines


def score_translations(
    model: QvattnModel | LeanModel,
    tokenizers: TokenizerPair,
    pairs: Sequence[tuple[str, str]],
    beam: int = 5,
    *,
    length_penalty: float = 1.0,
    max_new_tokens: int = 256,
    rows: int = 64,
    on_lines: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Translate the sources of (source, reference) pairs and score the corpus against the references.

    Returns bleu and chrf (0 to 100) with bleu_signature and chrf_signature, and how the translations were found (beam,
    length_penalty, sentences, unfinished). All pairs count; none is dropped or cut.
    """
    if not pairs:
        raise UserError("pairs=[]: there is nothing to score")
    search = Search(beam=beam, length_penalty=length_penalty, max_new_tokens=max_new_tokens, rows=rows)
    made = translate_lines(model, tokenizers, [source for source, _ in pairs], search, on_lines=on_lines)
    return {
        **corpus_scores(made.texts, [reference for _, reference in pairs]),
        "beam": beam,
        "length_penalty": length_penalty,
        "sentences": len(pairs),
        "unfinished": made.unfinished,
    }


def corpus_scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """bleu, chrf and their signatures for translations (one a line) against one reference each."""
    from sacrebleu.metrics import BLEU, CHRF

    if len(texts) != len(references):
        raise UserError(f"{len(texts)} translations for {len(references)} references: there must be one for each")
    scores: dict[str, Any] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        scores[name] = float(metric.corpus_score(list(texts), [list(references)]).score)
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores
