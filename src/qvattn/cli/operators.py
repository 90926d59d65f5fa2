"""`qvattn operators`: how much of a model's attention heads other variants could represent. No logic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qvattn.cli.output import check_page, hand_over, say, stdout_console

if TYPE_CHECKING:
    from rich.table import Table


def operators(
    model: Annotated[
        str,
        typer.Argument(
            help="A run directory, a checkpoint, or a Hugging Face model: directory, GGUF file, name on the hub, or "
            "smollm2-135m.",
            metavar="MODEL",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", "--html", help="The page to write.")] = Path(
        "operators.html"
    ),
    sizes: Annotated[
        str | None, typer.Option(help="Sizes of contexts, latents and thin keys. Default: 1/4, 1/2, 1, 2 head widths.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Also weigh by the activations of a language model on this text.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text to read, at most.")] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON on stdout.")] = False,
) -> None:
    """Measure operator freedom: what each head compares, and what of it fewer or no keys could represent.

    Per head M = W_Q W_K^T: effective rank, principal angles between heads that share a key, and the least-squares
    residual if keys were shared, made thin, or made from values and a small context. Weights are only read. Under RoPE
    both at offset 0 and as the mean over every offset. Writes a page with pictures, and all numbers beside it as JSON.
    """
    from qvattn.lab.operators import measure
    from qvattn.lab.operators_page import write_page
    from qvattn.lab.operators_source import open_model, second_moments

    check_page(output, "operators.html")
    wanted = None if sizes is None else _sizes(sizes)
    opened = open_model(model)
    moments = None
    if text is not None:
        moments = second_moments(opened, text, tokens, progress=lambda done: say(f"read {done} tokens"))
    found = measure(opened.layers, name=opened.name, sizes=wanted, moments=moments, progress=say)
    write_page(found, output)
    hand_over(found, output, as_json=as_json, show=lambda: stdout_console().print(_table(found)))


def _sizes(text: str) -> list[int]:
    from qvattn.errors import UserError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--sizes {text!r}: give positive whole numbers with commas between, such as 16,32,64")
    return [int(part) for part in parts]


def _table(found: dict[str, Any]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    measures = list(found["summary"][0]["residual"])
    table = Table(box=SIMPLE_HEAD, caption="relative residual |M - M'| / |M|: mean over heads (least to most)")
    table.add_column("keys from")
    table.add_column("cache a token and layer", justify="right")
    for name in measures:
        table.add_column(name, justify="right")
    for row in found["summary"]:
        cells = [
            f"{one['mean']:.3f} ({one['least']:.2f} to {one['most']:.2f})" for one in map(row["residual"].get, measures)
        ]
        table.add_row(row["name"], f"{row['cache']:,}", *cells)
    return table
