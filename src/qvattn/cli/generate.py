"""`qvattn generate`: continue a prompt with a trained language model. No logic of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import print_json, say

if TYPE_CHECKING:
    from ..data import Tokenizers
    from ..models import QvattnModel


def generate(
    model: Annotated[Path, typer.Argument(help="A run directory, one of its checkpoints, or a saved model.")],
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.", min=0.0)] = 1.0,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this total mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text while it is made.")] = False,
    checkpoint: Annotated[str, typer.Option(help="best or last, of a run.")] = "best",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Continue a prompt and print the text, the prompt included."""
    from ..decode.prompt import continue_text
    from ..errors import UserError
    from ..models import CausalLM

    if stream and as_json:
        raise UserError("--stream and --json would both write to standard output: give one of them")
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded, tokenizer, before, folder = load_writer(model, checkpoint, device)
    if not isinstance(loaded, CausalLM):
        raise UserError(f"{model} holds a translation model: `qvattn translate` translates with it")
    made = continue_text(
        loaded,
        tokenizer,
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        before=before,
        on_text=_print_at_once if stream else None,
    )
    if as_json:
        print_json({**vars(made), "seed": seed, "temperature": temperature, "checkpoint": str(folder)})
    else:
        print("" if stream else made.text)
    say(f"{made.new_tokens} tokens, {made.tokens_per_second:.0f} tokens/s, cache {made.cache_bytes} bytes")


def _print_at_once(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def load_writer(path: Path, checkpoint: str, device: str) -> tuple[QvattnModel, Any, list[int] | None, Path]:
    """A language model, its tokenizer, the ids before a text (None: as in our training), and where it lay.

    A model with a tokenizer of transformers beside it (one that was imported or converted) begins a text as that
    tokenizer does, which puts its own tokens in front.
    """
    from ..lab.check.loading import find_run, load

    if path.is_dir() and find_run(path) is None and (path / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        return load(path).to(device).eval(), AutoTokenizer.from_pretrained(path, trust_remote_code=False), [], path
    loaded, tokenizers, folder = load_run(path, checkpoint, device)
    return loaded, tokenizers.target, None, folder


def load_run(path: Path, checkpoint: str, device: str) -> tuple[QvattnModel, Tokenizers, Path]:
    """The model of a run (or of a saved model's folder) ready for decoding, its tokenizers, and where it lay."""
    from ..data import Tokenizers
    from ..errors import UserError
    from ..lab.check.loading import find_run, load
    from ..train.checkpoint import find_checkpoint

    if checkpoint not in ("best", "last"):
        raise UserError(f"--checkpoint {checkpoint}: allowed are best, last")
    which: Any = checkpoint
    run = find_run(path)
    folder = find_checkpoint(path, which) if run == path else path
    try:
        model = load(folder).to(device).eval()
    except RuntimeError as error:
        raise UserError(f"--device {device}: {error}") from None
    return model, Tokenizers.load(run or folder), folder
