"""`qvattn explain`: what a decoding step does, in shapes. No logic of its own."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qvattn.cli.output import print_json, stdout_console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qvattn.lab.explain import Walk


class Topic(StrEnum):
    """What can be explained."""

    shapes = "shapes"


def explain(
    topic: Annotated[Topic, typer.Argument(help="shapes: one decoding step, product by product.")],
    d_model: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 4096,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Shared heads, of variants that have them.")] = None,
    history: Annotated[int, typer.Option(min=0, help="Tokens in the cache before the step.")] = 100,
    variant: Annotated[
        list[str] | None, typer.Option(help="Repeat for more than one. Default: gqa with --kv-heads, else mha.")
    ] = None,
    position: Annotated[str, typer.Option(help="Position scheme.")] = "none",
    field: Annotated[
        list[str] | None, typer.Option("--set", help="More fields of the spec.", metavar="NAME=NUMBER")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the walk as JSON on stdout.")] = False,
) -> None:
    """Walk through one decoding step of any variant with every shape, and show the cache it needs beside MHA's."""
    from qvattn.lab.explain import spec_for, walk

    assert topic is Topic.shapes
    names = variant or ["mha" if kv_heads is None else "gqa"]
    fields = dict(_field(text) for text in field or ())
    walks = [walk(spec_for(name, d_model, heads, kv_heads, position=position, **fields), history) for name in names]
    if as_json:
        print_json([one.as_dict() for one in walks])
        return
    console = stdout_console()
    for one in walks:
        console.print(_table(one))
        console.print(_cache(one))


def _field(text: str) -> tuple[str, Any]:
    from qvattn.errors import UserError

    name, _, value = text.partition("=")
    if not (name and value.isdigit()):
        raise UserError(f"--set {text}: give a field and a whole number, such as d_ctx=128")
    return name, int(value)


def _table(one: Walk) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    spec = one.spec
    title = f"{spec.variant}: token {one.history + 1}, d_model {spec.d_model}, {spec.n_heads} heads of {spec.d_head}"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for column in ("step", "shapes", "times", "why"):
        table.add_column(column, no_wrap=column in ("shapes", "times"))
    for line in one.lines:
        times = "" if line.count == 1 else f"{line.count} {line.each}s"
        table.add_row(escape(line.what), line.shapes, times, escape(line.why))
    return table


def _cache(one: Walk) -> str:
    tokens = one.history + 1
    own = ", ".join(f"{line.stream} {line}" for line in one.cache)
    mha = ", ".join(f"{line.stream} {line}" for line in one.baseline)
    less = f"{one.saved:.4g} % less" if one.saved > 0 else f"{-one.saved:.4g} % more" if one.saved < 0 else "the same"
    q = f"{one.spec.n_heads} x ({tokens},{one.spec.variant_class.query_width(one.spec)})"
    return (
        f"cache:        {own} = {one.elements:,} elements a layer\n"
        f"mha beside:   {mha} = {one.baseline_elements:,} elements: {less}\n"
        f"never cached: queries {q}, scores {one.spec.n_heads} x ({tokens},{tokens}): no later step reads them\n"
    )
