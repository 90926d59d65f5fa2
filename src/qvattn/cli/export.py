"""`qvattn export`: the sharded checkpoint of a run as one safetensors file. No logic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .output import print_json, say


def export(
    run: Annotated[Path, typer.Argument(help="A run directory of `qvattn train`.")],
    which: Annotated[str, typer.Option(help="The best or the last checkpoint.")] = "best",
    out: Annotated[
        Path | None, typer.Option(help="A new directory for weights, config and tokenizer. Default: in the checkpoint.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the path as JSON on stdout.")] = False,
) -> None:
    """Put the shards that several processes wrote together, as one model.safetensors.

    A run that is complete has done so by itself, for its best and its last checkpoint. Without --out the file is added
    to the checkpoint, and every command that takes a run reads it.
    """
    from ..errors import UserError
    from ..train.export import export_run

    names: dict[str, Literal["best", "last"]] = {"best": "best", "last": "last"}
    if which not in names:
        raise UserError(f"--which {which!r}: allowed are best, last")
    file = export_run(run, names[which], out)
    if as_json:
        print_json({"file": str(file), "bytes": file.stat().st_size})
    else:
        say(f"{file}: {file.stat().st_size:,} bytes")
