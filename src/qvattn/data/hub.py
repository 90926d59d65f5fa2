"""Corpora from the Hugging Face hub, through `datasets.load_dataset`.

Knows the two ways in which rows carry a pair (a `translation` dict, or a column a language) and nothing else.
It must never guess: a missing training split, column or language is an error that lists what is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ..errors import UserError
from .spec import HubSpec


def load_hub_pairs(hub: HubSpec, limit: int | None) -> dict[str, list[tuple[str, str]]]:
    """Raw pairs by split; `limit` bounds the rows fetched of the training split when streaming."""
    return {split: [_pair(row, hub) for row in rows] for split, rows in _splits(hub, limit).items()}


def load_hub_texts(hub: HubSpec, limit: int | None) -> dict[str, list[str]]:
    """Raw documents (rows of `text_column`) by split."""
    return {split: [_text(row, hub) for row in rows] for split, rows in _splits(hub, limit).items()}


def stream_hub_rows(hub: HubSpec, limit: int | None, *, pairs: bool) -> dict[str, Iterator[tuple[str, ...]]]:
    """Rows by split as they come, (source, target) or (document,); nothing is read before it is asked for.

    limit: of the training split. A connection that breaks for good is a `UserError`.
    """

    def row_of(row: dict[str, Any]) -> tuple[str, ...]:
        return _pair(row, hub) if pairs else (_text(row, hub),)

    return {split: _guarded(map(row_of, rows), hub, split) for split, rows in _splits(hub, limit).items()}


def _guarded(rows: Iterator[tuple[str, ...]], hub: HubSpec, split: str) -> Iterator[tuple[str, ...]]:
    count = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except UserError:
            raise
        except Exception as error:  # whatever the network, the host or a damaged file come up with
            raise UserError(
                f"hub.name={hub.name!r}: the {split} split broke off after {count} rows: {error}"
            ) from error
        count += 1
        yield row


def _splits(hub: HubSpec, limit: int | None) -> dict[str, Iterator[dict[str, Any]]]:
    found = _load(hub)
    names = {"train": hub.train_split, "valid": hub.valid_split, "test": hub.test_split}
    for split, name in names.items():
        # an effective recipe writes defaults out: only another name than the default is a wish
        needed = split == "train" or name != HubSpec.model_fields[f"{split}_split"].default
        if needed and name is not None and name not in found:
            raise UserError(f"hub.{split}_split={name!r}: {hub.name} has the splits {sorted(found)}")
    rows = {split: iter(found[name]) for split, name in names.items() if name in found}
    if hub.streaming and limit is not None:
        rows["train"] = islice(rows["train"], limit)
    return rows


def _load(hub: HubSpec) -> Any:
    import datasets

    try:
        found = datasets.load_dataset(hub.name, hub.config, streaming=hub.streaming)
    except (OSError, ValueError, RuntimeError) as error:
        config = f", config {hub.config!r}" if hub.config else ""
        raise UserError(f"hub.name={hub.name!r}{config} cannot be loaded: {error}") from error
    if not hasattr(found, "keys"):
        raise UserError(f"hub.name={hub.name!r}: expected a dataset with named splits, got {type(found).__name__}")
    return found


def _pair(row: dict[str, Any], hub: HubSpec) -> tuple[str, str]:
    by_language = row["translation"] if isinstance(row.get("translation"), dict) else row
    missing = [name for name in (hub.source_language, hub.target_language) if name not in by_language]
    if missing:
        raise UserError(f"hub: {hub.name} has no language {missing[0]!r}; a row has {sorted(by_language)}")
    return by_language[hub.source_language] or "", by_language[hub.target_language] or ""


def _text(row: dict[str, Any], hub: HubSpec) -> str:
    if hub.text_column not in row:
        raise UserError(f"hub.text_column={hub.text_column!r}: a row of {hub.name} has {sorted(row)}")
    return row[hub.text_column] or ""
