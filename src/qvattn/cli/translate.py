"""`qvattn translate`: translate a text file with a trained run. No logic of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from .output import print_json, say, stderr_console

STANDARD = Path("-")


def translate(
    run: Annotated[Path, typer.Argument(help="A run directory of `qvattn train`, or one of its checkpoints.")],
    input: Annotated[Path, typer.Option(help="UTF-8 text, one sentence a line (.gz too); - is standard input.")],
    output: Annotated[Path, typer.Option(help="Where the translations go, line by line; - is standard output.")],
    beam: Annotated[int, typer.Option(help="Hypotheses kept; 1 is greedy.", min=1)] = 5,
    length_penalty: Annotated[float, typer.Option(help="Scores are divided by length to this power.")] = 1.0,
    max_length: Annotated[
        int | None, typer.Option(help="Most source tokens of a line. Default: the recipe's data.max_length.", min=2)
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut longer lines (and count them).")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of a translation.", min=1)] = 256,
    batch: Annotated[int, typer.Option(help="Lines translated at once.", min=1)] = 64,
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON on stdout.")] = False,
) -> None:
    """Translate a file line by line.

    Lines keep their order; an empty line stays empty. A line that is too long is refused with its number, before
    anything is written, unless --truncate is given. The output file appears when all of it is there.
    """
    from ..data.lines import read_lines
    from ..decode.text import Search, translate_lines
    from ..errors import UserError
    from ..lab.check.loading import find_run
    from ..models import TranslationModel

    if as_json and output == STANDARD:
        raise UserError("--json and --output - would both write to standard output: give --output a file")
    if output.is_dir():
        raise UserError(f"--output {output} is a directory; give a file")
    lines = _read_standard_input() if input == STANDARD else read_lines(input, "--input")
    from .generate import load_run

    model, tokenizers, folder = load_run(run, checkpoint, device)
    if not isinstance(model, TranslationModel):
        raise UserError(f"{run} holds a language model: `qvattn generate` continues a prompt with it")
    begun = time.perf_counter()
    with _progress(len(lines)) as advance:
        made = translate_lines(
            model,
            tokenizers,
            lines,
            Search(beam=beam, length_penalty=length_penalty, max_new_tokens=max_new_tokens, rows=batch),
            max_source_tokens=max_length or _trained_length(find_run(run)),
            truncate=truncate,
            on_lines=advance,
        )
    seconds = time.perf_counter() - begun
    _write(output, made.texts)
    for count, what in (
        (made.truncated, "lines were cut to the allowed length"),
        (made.unfinished, f"translations were ended after {max_new_tokens} tokens (--max-new-tokens)"),
    ):
        if count:
            say(f"{count} {what}")
    say(f"{len(lines)} lines in {seconds:.1f} s ({made.target_tokens / seconds:.0f} target tokens/s), beam {beam}")
    if as_json:
        counts = {name: value for name, value in vars(made).items() if name != "texts"}
        summary = {"lines": len(lines), **counts, "beam": beam, "length_penalty": length_penalty, "seconds": seconds}
        print_json({**summary, "checkpoint": str(folder), "output": str(output)})


def _trained_length(run: Path | None) -> int | None:
    """The longest sentence the run was trained on, in tokens."""
    from ..train.recipe import read_recipe

    if run is None:
        return None
    recipe = read_recipe((run / "recipe.yaml").read_text(encoding="utf-8"), origin=str(run / "recipe.yaml"))
    return recipe.data.max_length


def _read_standard_input() -> list[str]:
    from ..errors import UserError

    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text (byte {error.start + 1})") from None
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def _write(output: Path, texts: list[str]) -> None:
    from ..errors import UserError
    from ..files import write_atomically

    text = "".join(f"{line}\n" for line in texts)
    if output == STANDARD:
        sys.stdout.write(text)
        return
    try:
        write_atomically(output, text)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror or error}") from None


def _progress(total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A bar on a terminal, otherwise a line every few seconds; on stderr."""
    from contextlib import contextmanager

    from rich.progress import Progress

    @contextmanager
    def bar():  # type: ignore[no-untyped-def]
        console = stderr_console()
        if console.is_terminal:
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task("translate", total=total)
                yield lambda count: progress.advance(task, count)
            return
        done, spoken = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, spoken
            done += count
            if time.monotonic() - spoken > 10:
                spoken = time.monotonic()
                say(f"{done}/{total} lines")

        yield advance

    return bar()
