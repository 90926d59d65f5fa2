"""`qvattn bench decode`: the speed of one decoded token's attention, beside PyTorch's own. No logic of its own."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from qvattn.cli.output import print_json, say, stdout_console

if TYPE_CHECKING:
    from qvattn.lab.bench_decode import Case


class What(StrEnum):
    """What can be timed."""

    decode = "decode"


def bench(
    what: Annotated[What, typer.Argument(help="What to time.")],
    shapes: Annotated[
        str | None, typer.Option(help="B,H,T,d of each shape, joined by ';'. Default: five usual ones.")
    ] = None,
    dtypes: Annotated[str, typer.Option(help="Cache dtypes, joined by commas.")] = "fp32,bf16,fp16,int8",
    cases: Annotated[str | None, typer.Option(help="Cases, joined by commas. Default: all.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each shape and dtype.", min=0.1)] = 2.0,
    threads: Annotated[int | None, typer.Option(help="Default: what PyTorch uses.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON on stdout.")] = False,
) -> None:
    """Time the attention of one decoded token over caches of several kinds, alternating in one process.

    Use a quiet machine. Ratios are of medians; the read bandwidth beside them is measured in the same process.
    """
    import torch

    from qvattn.errors import UserError
    from qvattn.lab.bench_decode import CASES, DTYPES, SHAPES, machine, measure

    chosen = [_shape(s) for s in shapes.split(";")] if shapes else list(SHAPES)
    names = dtypes.split(",")
    wanted = cases.split(",") if cases else list(CASES)
    for field, given, allowed in (("--dtypes", names, DTYPES), ("--cases", wanted, CASES)):
        for name in given:
            if name not in allowed:
                raise UserError(f"{field} {name}: allowed are {', '.join(allowed)}")
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    rows: list[Case] = []
    for shape in chosen:
        for dtype in names:
            say(f"B, H, T, d = {shape}, {dtype}")
            rows += measure(wanted, dtype, shape, seconds=seconds)
    if as_json:
        print_json({"machine": machine(), "rows": [row.as_dict() for row in rows]})
    else:
        _print(rows)


def _shape(text: str) -> tuple[int, int, int, int]:
    from qvattn.errors import UserError

    parts = text.split(",")
    if len(parts) != 4 or not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise UserError(f"--shapes {text}: expected four positive integers B,H,T,d such as 1,8,8192,64")
    B, H, T, d = map(int, parts)
    return B, H, T, d


def _print(rows: list[Case]) -> None:
    from rich.table import Table

    table = Table(caption="GB/s of what must be read at least once; share of the read bandwidth measured beside it.")
    for column in ("B, H, T, d", "cache", "case"):
        table.add_column(column)
    for column in ("ms", "GB/s", "share", "x SDPA", "x mha"):
        table.add_column(column, justify="right")
    before = None
    for row in rows:
        if before not in (None, (row.shape, row.dtype)):
            table.add_section()
        before = (row.shape, row.dtype)
        table.add_row(
            ", ".join(map(str, row.shape)),
            row.dtype,
            row.case,
            f"{1e3 * row.median:.3f}",
            f"{row.bandwidth / 1e9:.1f}",
            f"{100 * row.share:.0f} %",
            "" if row.to_sdpa is None else f"{row.to_sdpa:.2f}",
            "" if row.to_mha is None else f"{row.to_mha:.2f}",
        )
    stdout_console().print(table)
