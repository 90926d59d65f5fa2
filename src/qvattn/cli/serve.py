"""`qvattn serve`: an OpenAI-compatible server for a language model of ours. No logic of its own."""

from __future__ import annotations

from typing import Annotated

import typer


def serve(
    model: Annotated[str, typer.Argument(help="A saved language model of ours: a directory, or a name on the hub.")],
    more: Annotated[
        list[str] | None, typer.Argument(help="After `--`: further options, handed to `transformers serve`.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=1, max=65535)] = 8000,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes an accelerator where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the weights; auto: as they are stored.")] = "auto",
) -> None:
    """Answer OpenAI-style requests (/v1/chat/completions, /v1/completions, ...) with a language model of ours.

    This is `transformers serve` in a process that knows our classes; it needs the extra `serve`. Stop it with Ctrl-C.
    """
    from ..hf.serving import serve as run

    run(model, host=host, port=port, device=device, dtype=dtype, more=more or [])
