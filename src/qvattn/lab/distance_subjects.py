"""What `qvattn distance` can look at: runs, saved models, and whatever `qvattn.hf.adopt` takes.

Only finds and loads; what is measured is in `distance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ..data import DataSpec, load_text
from ..data.corpus import evenly
from ..data.lines import read_lines
from ..errors import UserError
from ..models import CausalLM
from .check.loading import CLASSES, Texts, find_run, load_subject
from .check.subject import Sample, Subject
from .distance import measure
from .runs import find_runs, is_run, read_json, read_run


def measure_all(
    subjects: Sequence[str],
    *,
    source: Path | None = None,
    target: Path | None = None,
    text: Path | None = None,
    sentences: int = 100,
    length: int = 256,
    checkpoint: Literal["best", "last"] = "best",
) -> Iterator[dict[str, Any]]:
    """`distance.measure` of every subject, with a `name` and, for runs, a `seed`.

    subjects: paths of runs, of directories that hold some, of saved models; or what `adopt` takes: names of language
        models on the hub, GGUF files, `smollm2-135m`.
    source, target, text: files that take the place of a run's validation data.  length: most tokens of a sentence.
    Without `text`, foreign models read the King James text of the `demo` extra.
    """
    texts = Texts(source=source, target=target, text=text)
    for name in _names(subjects):
        path = Path(name).expanduser()
        if path.is_dir() and (find_run(path) is not None or _model_type(path) in CLASSES):
            subject = load_subject(path, texts=texts, sentences=sentences, length=length, checkpoint=checkpoint)
            yield {**_named(path), **measure(subject)}
        else:
            subject = foreign(name, texts, sentences=sentences, length=length)
            yield {"name": path.name if path.exists() else name, "seed": None, **measure(subject)}


def foreign(name: str, texts: Texts, *, sentences: int, length: int) -> Subject:
    """A Hugging Face language model in our classes, in float32, over blocks of `length` tokens of text."""
    from ..hf import adopt

    if texts.source or texts.target:
        raise UserError(f"{name}: a language model has no source: give --text")
    model = adopt(name, dtype=torch.float32)
    documents = read_lines(texts.text, "--text") if texts.text else load_text(DataSpec(corpus="kjv")).test
    samples = blocks(model, documents, sentences=sentences, length=length)
    data = str(texts.text) if texts.text else "King James text, test split"
    return Subject(model=model, samples=samples, name=name, data=data)


def blocks(model: CausalLM, documents: Sequence[str], *, sentences: int, length: int) -> list[Sample]:
    """Blocks of running text in the model's own tokens, without special ones, spread evenly."""
    if model.tokenizer is None:
        raise UserError("the model brings no tokenizer, so no text can be read")
    flat: list[int] = []
    for document in documents:
        flat += model.tokenizer.encode(document + "\n", add_special_tokens=False)
    starts = evenly(list(range(0, len(flat) - length + 1, length)), sentences)
    if not starts:
        raise UserError(f"the text has {len(flat)} tokens, which do not fill a block of --length {length}")
    return [Sample(ids=torch.tensor([flat[start : start + length]])) for start in starts]


def _model_type(path: Path) -> str:
    return str(read_json(path / "config.json", strict=False).get("model_type"))


def _names(subjects: Sequence[str]) -> list[str]:
    """Runs at or below each directory; everything else as it is."""
    found: list[str] = []
    for name in subjects:
        path = Path(name).expanduser()
        searched = path.is_dir() and not (path / "config.json").is_file() and not is_run(path)
        found += map(str, find_runs(path)) if searched else [name]
    return list(dict.fromkeys(found))


def _named(path: Path) -> dict[str, Any]:
    run = find_run(path)
    if run is None:
        return {"name": path.name, "seed": None}
    record = read_run(run)
    return {"name": f"{record.name}, seed {record.seed}", "variant_name": record.name, "seed": record.seed}
