"""`qvattn plan`: memory, operations and roofline speed of a model and of its conversions. No logic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qvattn.cli.output import print_json, stdout_console

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from qvattn.lab.plan import Plan

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
DEFAULT_HARDWARE = "h100-sxm"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face config (file, directory, or name on the hub), a run of ours, or an attention spec: a "
            "file, or variant=gqa,d_model=4096,n_heads=32,v_heads=8,layers=32.",
            metavar="SPEC_OR_MODEL",
        ),
    ],
    context: Annotated[int, typer.Option(help="Tokens in the cache of every row.", min=0)] = 4096,
    batch: Annotated[int, typer.Option(help="Rows that are decoded together.", min=1)] = 1,
    source: Annotated[
        int | None, typer.Option(help="Source tokens, of encoder-decoder models.", min=0, show_default="--context")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Of the cache: {', '.join(DTYPES)}.")] = "bf16",
    weights: Annotated[
        str | None, typer.Option(help="Type of the weights, as --dtype.", show_default="bf16, or fp32 with it")
    ] = None,
    hardware: Annotated[
        list[str] | None, typer.Option(help="Of the table; repeat for more.", show_default=DEFAULT_HARDWARE)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Budget, weights included: 24GiB, 80GB.", show_default="the device's")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Of the memory, in place of the table's: 3.35TB/s.")] = None,
    flops: Annotated[str | None, typer.Option(help="Peak, in place of the table's: 989TFLOPS.")] = None,
    hardware_table: Annotated[Path | None, typer.Option(help="Your own hardware table (YAML).")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Show this conversion only; repeat for more.", show_default="all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON on stdout.")] = False,
) -> None:
    """Plan memory and speed of decoding: the model as it is, and each variant it could be converted to.

    Costs only: the plan does not know accuracy.
    """
    from qvattn.lab import plan as planner

    cache_dtype = _dtype(dtype, "--dtype")
    weights_dtype = _dtype(weights or ("fp32" if cache_dtype.itemsize == 4 else "bf16"), "--weights")
    budget = None if memory is None else planner.quantity(memory, "--memory")
    speed = None if bandwidth is None else planner.quantity(bandwidth, "--bandwidth")
    peak = None if flops is None else planner.quantity(flops, "--flops")
    names = hardware or ([] if speed and peak else [DEFAULT_HARDWARE])
    devices = planner.choose(names, path=hardware_table or planner.TABLE, memory=budget, bandwidth=speed, flops=peak)
    work = planner.Workload(
        context=context, batch=batch, source=source, cache_dtype=cache_dtype, weights_dtype=weights_dtype
    )
    result = planner.plan(planner.shape_of(model), work, devices, variants=variant)
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result)


def _dtype(text: str, option: str) -> torch.dtype:
    import torch

    from qvattn.errors import UserError

    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise UserError(f"{option} {text}: allowed are {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _print(result: Plan) -> None:
    console = stdout_console()
    console.print(_kinds(result))
    console.print(_rows(result))
    for name, reason in result.refused.items():
        console.print(f"not possible: {name}: {reason}", markup=False)
    console.print(f"fastest of the front on {result.hardware[0]['name']}: {result.choice}", markup=False)
    console.print(f"without any training: {result.exact_choice}", markup=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)


def _kinds(result: Plan) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    made_for = "" if result.longest is None else f", made for {result.longest:,} tokens"
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{result.model}: the model as it is{made_for}",
        title_justify="left",
        title_style="bold",
        caption="one row; streams: heads x width, S scores, V is summed",
        caption_justify="left",
    )
    for column in ("kind of layer", "layers", "streams", "elements/token·layer", "bytes/token", "tokens kept", "bytes"):
        table.add_column(column, justify="left" if column in ("kind of layer", "streams") else "right")
    for row in result.kinds:
        table.add_row(
            escape(row.kind),
            str(row.layers),
            escape("\n".join(row.streams)) or ("constant state" if row.state_bytes else "none of its own"),
            f"{row.elements:,}",
            f"{row.bytes_per_token:,}",
            f"{row.tokens_kept:,}",
            _size(row.cache_bytes),
        )
    return table


def _rows(result: Plan) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    memory = "no memory budget" if result.memory is None else f"{_size(result.memory)} of memory, weights included"
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{result.batch} x {result.context:,} tokens, cache {result.cache_dtype}, weights "
        f"{result.weights_dtype}, {memory}",
        title_justify="left",
        title_style="bold",
        caption="* on the Pareto front of cache, FLOPs and parameters.  = exact: from the model's own weights, without "
        "training.  FLOPs: a multiply-add is 2.\nread: bytes moved per decoded token, weights shared by the batch.  "
        "tok/s: at most, of all rows; m: memory, c: compute is the limit; !: does not fit.",
        caption_justify="left",
    )
    table.add_column("")
    table.add_column("model")
    columns = ("cache B/token", "cache", "%", "parameters", "FLOPs/token", "read/token", "FLOPs/B")
    for column in (*columns, "largest batch", "longest context", *(f"{one['name']} tok/s" for one in result.hardware)):
        table.add_column(column, justify="right")
    for row in result.rows:
        table.add_row(
            ("*" if row.on_front else " ") + ("=" if row.exact else " "),
            escape(row.name),
            f"{row.cache_bytes_per_token:,}",
            _size(row.cache_bytes),
            f"{100 * row.cache_share:.0f}",
            _short(row.parameters),
            _short(row.flops_per_token),
            _size(row.bytes_per_decoded_token),
            f"{row.intensity:.3g}",
            _limit(row.largest_batch, result.memory),
            _limit(row.longest_context, result.memory),
            *(
                f"{one.tokens_per_second:,.0f} {one.bound[0]}{'!' if one.fits is False else ' '}"
                for one in row.rooflines
            ),
        )
    return table


def _limit(value: int | None, memory: float | None) -> str:
    if value is None:
        return "–" if memory is None else "any"
    return f"{value:,}"


def _size(number: float) -> str:
    for power, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= power:
            return f"{number / power:.4g} {unit}"
    return f"{number:.0f} B"


def _short(number: float) -> str:
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= power:
            return f"{number / power:.3g} {letter}"
    return f"{number:.0f}"
