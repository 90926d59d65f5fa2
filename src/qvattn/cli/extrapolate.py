"""`qvattn extrapolate`: perplexity beyond the length of training. No logic of its own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from qvattn.cli.output import check_page, hand_over, say


class Which(StrEnum):
    """Which of a run's models."""

    best = "best"
    last = "last"


class Split(StrEnum):
    """Which held-out text."""

    valid = "valid"
    test = "test"


def extrapolate(
    directories: Annotated[
        list[Path],
        typer.Argument(help="Directories of comparisons, or of runs of language models.", metavar="DIR..."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("extrapolation.html"),
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens in a window, with commas between. Default: 1, 2, 4, 8, 16 times those of training."),
    ] = None,
    scored: Annotated[int, typer.Option(min=1, help="Tokens scored in every passage.")] = 256,
    passages: Annotated[int, typer.Option(min=1, help="Passages, spread evenly over the text.")] = 24,
    split: Annotated[Split, typer.Option(help="Which held-out text.")] = Split.test,
    baseline: Annotated[str | None, typer.Option(help="The variant that differences are taken to.")] = None,
    checkpoint: Annotated[Which, typer.Option(help="Which model of a run.")] = Which.best,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON on stdout.")] = False,
) -> None:
    """Measure what language models make of more context than they were trained on (recipe `extrapolation`).

    The same tokens are scored at every length: only the context before them grows. Results of each run are kept in
    DIR/extrapolation and read back when asked for again. Writes a page with the curves, and all numbers beside it as
    JSON; prints two Markdown tables, perplexity and the change of loss with length.
    """
    import torch

    from qvattn.lab.extrapolation import markdown, measure_all, summary
    from qvattn.lab.extrapolation_page import write_page

    check_page(output, "extrapolation.html")
    if threads is not None:
        torch.set_num_threads(threads)
    chosen: dict[str, Any] = {
        "scored": scored,
        "passages": passages,
        "split": split.value,
        "checkpoint": checkpoint.value,
    }
    if lengths is not None:
        chosen["lengths"] = _numbers(lengths)
    results = measure_all(directories, chosen, say=say)
    lines = summary(results, baseline=baseline)
    content = {"variants": [line.as_dict() for line in lines], "runs": results}
    write_page(lines, results, output, title="Extrapolation")
    hand_over(content, output, as_json=as_json, show=lambda: typer.echo(markdown(lines), nl=False))


def _numbers(text: str) -> tuple[int, ...]:
    from qvattn.errors import UserError

    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(f"--lengths {text!r}: give whole numbers with commas between, such as 128,256,512") from None
