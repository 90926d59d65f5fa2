"""From a `DataSpec` to sentence pairs in three splits.

Every corpus goes through the same filter, and every pair that is left out is counted in `notes`, by reason.
Nothing here depends on a random state, so the same spec and files give the same pairs on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import UserError
from .hub import load_hub_pairs
from .lines import read_lines, resolve
from .spec import DataSpec
from .synthetic.controlled import ControlledSpec, controlled_pairs
from .verses import load_verse_pairs

Pair = tuple[str, str]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sentence pairs `(source, target)` by split; `notes` holds what was counted: sizes, drops."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
    name: str
    notes: dict[str, int | str] = field(default_factory=dict)


def load_corpus(spec: DataSpec) -> Corpus:
    """Load, clean and split the parallel corpus that `spec` names.

    `test` may be empty; `train` and `valid` may not. Errors are `UserError`s that name the file or field.
    """
    if spec.is_text:
        raise UserError(
            f"data.corpus={spec.corpus!r} holds plain text: translation needs verses, files, tsv, hub or controlled"
        )
    raw, notes = _read(spec)
    splits = {split: _keep_filled(raw.get(split, []), split, spec, notes) for split in ("train", "valid", "test")}
    if not splits["train"]:
        raise UserError(f"data.corpus={spec.corpus!r}: no training pair is left ({_reasons(notes)})")
    ours = spec.corpus in ("verses", "controlled")
    if "valid" not in raw:
        splits["train"], splits["valid"] = hold_out(splits["train"], spec)
        notes["valid_held_out"] = len(splits["valid"])
        ours = True
    check_validation(splits["valid"], "valid" in raw, spec, _reasons(notes))
    train = _without_held_out(splits, notes, drop=ours)
    if not train:
        raise UserError(f"data.corpus={spec.corpus!r}: no training pair is left ({_reasons(notes)})")
    train = evenly(train, spec.max_train_pairs)
    notes |= {
        "train_pairs": len(train),
        "valid_pairs": len(splits["valid"]),
        "test_pairs": len(splits["test"]),
    }
    return Corpus(train=train, valid=splits["valid"], test=splits["test"], name=_name(spec), notes=notes)


def evenly(items: list[T], limit: int | None) -> list[T]:
    """At most `limit` of the items, evenly spaced, in their order."""
    if limit is None or len(items) <= limit:
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def hold_out(items: list[T], spec: DataSpec) -> tuple[list[T], list[T]]:
    """(train, valid): `valid_fraction` of the items, evenly spaced over the corpus, are set apart."""
    if spec.valid_fraction is None:
        raise UserError(
            f"data.corpus={spec.corpus!r} has no validation data: name some, or set data.valid_fraction=0.02"
        )
    count = int(len(items) * spec.valid_fraction)
    if count == 0:
        raise UserError(f"data.valid_fraction={spec.valid_fraction} of {len(items)} leaves no validation data")
    chosen = {(2 * i + 1) * len(items) // (2 * count) for i in range(count)}
    return (
        [item for i, item in enumerate(items) if i not in chosen],
        [item for i, item in enumerate(items) if i in chosen],
    )


def check_validation(valid: list[T], given: bool, spec: DataSpec, reasons: str) -> None:
    """Raise if the corpus brings validation data of its own and it is empty, or a fraction is asked for too."""
    if not valid:
        raise UserError(f"data.corpus={spec.corpus!r}: no validation data is left ({reasons})")
    if given and spec.valid_fraction is not None:
        raise UserError(
            f"data.valid_fraction={spec.valid_fraction}, but the corpus has a validation split; "
            "drop one of them (hub.valid_split=null leaves the split unused)"
        )


def _read(spec: DataSpec) -> tuple[dict[str, list[Pair]], dict[str, int | str]]:
    if spec.corpus == "verses":
        return load_verse_pairs()
    if spec.corpus == "controlled":
        return controlled_pairs(spec.controlled or ControlledSpec()), {}
    if spec.corpus == "hub":
        assert spec.hub is not None
        return load_hub_pairs(spec.hub, spec.max_train_pairs), {}
    read = _read_aligned if spec.corpus == "files" else _read_tsv
    found = {split: read(spec, split) for split in ("train", "valid", "test")}
    return {split: pairs for split, pairs in found.items() if pairs is not None}, {}


def _read_aligned(spec: DataSpec, split: str) -> list[Pair] | None:
    names = f"{split}_source", f"{split}_target"
    paths = [getattr(spec, name) for name in names]
    if paths[0] is None:
        return None
    files = [resolve(path, f"data.{name}") for path, name in zip(paths, names, strict=True)]
    sides = [read_lines(file, f"data.{name}") for file, name in zip(files, names, strict=True)]
    if len(sides[0]) != len(sides[1]):
        raise UserError(
            f"data.{names[0]} and data.{names[1]} are not aligned: "
            f"{files[0]} has {len(sides[0])} lines, {files[1]} has {len(sides[1])}"
        )
    return list(zip(*sides, strict=True))


def _read_tsv(spec: DataSpec, split: str) -> list[Pair] | None:
    path = getattr(spec, f"{split}_tsv")
    if path is None:
        return None
    file = resolve(path, f"data.{split}_tsv")
    source, target = spec.tsv_columns or (0, 1)
    pairs = []
    for number, line in enumerate(read_lines(file, f"data.{split}_tsv"), start=1):
        if not line.strip():
            pairs.append(("", ""))
            continue
        cells = line.split("\t")
        if len(cells) <= max(source, target) or (spec.tsv_columns is None and len(cells) != 2):
            hint = "" if spec.tsv_columns else "; more than two need data.tsv_columns"
            raise UserError(f"{file}, line {number}: {len(cells)} tab-separated columns, 2 are needed{hint}")
        pairs.append((cells[source], cells[target]))
    return pairs


def _keep_filled(pairs: Sequence[Pair], split: str, spec: DataSpec, notes: dict[str, int | str]) -> list[Pair]:
    stripped = [(source.strip(), target.strip()) for source, target in pairs]
    if spec.lowercase:
        stripped = [(source.lower(), target.lower()) for source, target in stripped]
    kept = [pair for pair in stripped if pair[0] and pair[1]]
    _count(notes, f"{split}_dropped_empty", len(stripped) - len(kept))
    return kept


def _without_held_out(splits: dict[str, list[Pair]], notes: dict[str, int | str], *, drop: bool) -> list[Pair]:
    """Training pairs; where the split is ours (`drop`) without copies of held-out ones, else only counted."""
    seen = set(splits["valid"]) | set(splits["test"])
    fresh = [pair for pair in splits["train"] if pair not in seen]
    key = "train_dropped_also_held_out" if drop else "train_also_held_out"
    _count(notes, key, len(splits["train"]) - len(fresh))
    return fresh if drop else splits["train"]


def _count(notes: dict[str, int | str], key: str, count: int) -> None:
    if count:
        notes[key] = count


def _reasons(notes: dict[str, int | str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in notes.items() if "dropped" in key) or "none was found"


def _name(spec: DataSpec) -> str:
    if spec.hub is not None:
        config = f"/{spec.hub.config}" if spec.hub.config else ""
        return f"{spec.hub.name}{config} {spec.hub.source_language}-{spec.hub.target_language}"
    named = {
        "verses": "King James to World English verses",
        "files": spec.train_source,
        "tsv": spec.train_tsv,
        "controlled": "controlled language",
    }
    return str(named[spec.corpus])
