"""`qvattn variants`: what every variant caches, holds and computes at a given width. No logic of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from qvattn.cli.output import print_json, stdout_console

if TYPE_CHECKING:
    from qvattn.lab.family import Family

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}


def variants(
    d_model: Annotated[int, typer.Option(help="Width of the model.", min=1)] = 512,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(help="Shared heads of the variants that share any.", min=1, show_default="H/4")
    ] = None,
    position: Annotated[str, typer.Option(help="Position scheme.")] = "none",
    dtype: Annotated[str, typer.Option(help=f"Of the cache: {', '.join(DTYPES)}.")] = "bf16",
    context: Annotated[int, typer.Option(help="Cached tokens that one decoded token attends to.", min=0)] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON on stdout.")] = False,
) -> None:
    """Print streams, cache, parameters and FLOPs of every variant at one width, per layer, and as shares of MHA."""
    import torch

    from qvattn.errors import UserError
    from qvattn.lab.family import family

    name = DTYPES.get(dtype, dtype)
    if name not in DTYPES.values():
        raise UserError(f"--dtype {dtype}: allowed are {', '.join(DTYPES)}")
    table = family(d_model, heads, kv_heads=kv_heads, position=position, dtype=getattr(torch, name), context=context)
    if as_json:
        print_json(table.to_dict())
    else:
        _print(table)


def _print(family: Family) -> None:
    from rich.markup import escape
    from rich.table import Table

    shared = "" if family.kv_heads is None else f", {family.kv_heads} shared heads"
    table = Table(
        title=f"One layer, d_model {family.d_model}, {family.n_heads} heads{shared}, position {family.position}, "
        f"cache in {family.dtype}, {family.context} cached tokens",
        caption="S scores, V is summed.  FLOPs: a multiply-add is 2.  %: share of mha.  "
        "read: cache bytes read to decode one token.",
    )
    table.add_column("variant")
    table.add_column("streams (heads x width)")
    for column in ("elements", "bytes", "%", "parameters", "%", "projection FLOPs", "attention FLOPs", "%", "read"):
        table.add_column(column, justify="right")
    for r in family.rows:
        table.add_row(
            r.variant,
            escape("\n".join(r.streams)),
            f"{r.cache_elements_per_token:,}",
            f"{r.cache_bytes_per_token:,}",
            f"{r.cache_share:.1%}",
            _short(r.parameters),
            f"{r.parameters_share:.0%}",
            _short(r.projection_flops_per_token),
            _short(r.attention_flops_per_token),
            f"{r.flops_share:.0%}",
            _short(r.bytes_read_per_token, "B"),
        )
    console = stdout_console()
    console.print(table)
    for name, reason in family.refused.items():
        console.print(f"{name}: {reason}", markup=False)


def _short(number: float, unit: str = "") -> str:
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= power:
            return f"{number / power:.3g} {letter}{unit}"
    return f"{number:.0f} {unit}".strip()
