"""`qvattn heal`: distil the original into a converted model. No logic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .output import print_json, say

INTERRUPTED = 130


def heal(
    converted: Annotated[str, typer.Argument(help="A checkpoint written by qvattn convert.")],
    teacher: Annotated[str, typer.Option(help="The original: a model on disk, or a name that convert knows.")],
    out: Annotated[Path, typer.Option(help="Where the run and the healed checkpoint go: new, empty, or this run's.")],
    text: Annotated[list[str], typer.Option(help="Training text, UTF-8, .gz too. May be given several times.")],
    valid: Annotated[
        str | None, typer.Option(help="Text of the perplexity curve. Default: the end of every training text.")
    ] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(help="Text scored before and after, never in between. May be given several times."),
    ] = None,
    what: Annotated[str, typer.Option(help="Weights that learn: attention, all, or new (which the teacher lacks).")] = (
        "attention"
    ),
    lora: Annotated[
        int | None, typer.Option(help="Rank of low-rank updates, merged at the end. Default: full weights.")
    ] = (None),
    steps: Annotated[int | None, typer.Option(help="Optimiser steps. Default: 200, or as --minutes says.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Instead of --steps: about so many minutes.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 4096,
    micro_tokens: Annotated[int, typer.Option(help="Tokens worked on at a time; decides the memory needed.")] = 2048,
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="Peak, after the warm-up; then a cosine down to 0.")] = 1e-4,
    warmup: Annotated[float, typer.Option(help="Share of the steps.")] = 0.05,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 switches clipping off.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="Of both distributions in the KL divergence.")] = 1.0,
    kl_weight: Annotated[float, typer.Option(help="Weight of KL(teacher || student).")] = 1.0,
    hidden_weight: Annotated[float, typer.Option(help="Weight of the hidden-state match.")] = 8.0,
    layers: Annotated[str, typer.Option(help="Layers whose outputs are matched: all, none, or 0,5,9.")] = "all",
    dtype: Annotated[str, typer.Option(help="Precision of the arithmetic: fp32 or bf16 (weights stay fp32).")] = "fp32",
    validations: Annotated[int, typer.Option(help="Points of the perplexity curve.")] = 10,
    valid_tokens: Annotated[int, typer.Option(help="Tokens of the curve's text.")] = 16384,
    test_tokens: Annotated[int, typer.Option(help="Tokens of each test text.")] = 32768,
    test_window: Annotated[int, typer.Option(help="Tokens of a window of the test texts, as in convert.")] = 2048,
    keep: Annotated[
        str, typer.Option(help="Which weights become the checkpoint: best (lowest KL on the curve) or last.")
    ] = "best",
    seed: Annotated[int, typer.Option(help="Order of the windows, and LoRA's first values.")] = 1,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the arithmetic; does not belong to the recipe.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete an earlier healing run in the folder.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Distil the original into a converted model: KL on logits plus hidden-state match.

    The loss of a token is kl_weight * KL(teacher || student) over the whole vocabulary, plus hidden_weight * the mean
    squared difference of normalised hidden states. Killed or interrupted (Ctrl-C saves first and exits with 130), the
    same command goes on to the very numbers of an uninterrupted run; with other options it is refused.

    OUT then holds the healed checkpoint, healing.json (perplexity before and after with intervals over windows, tokens,
    seconds, machine), history.csv and the curve as healing.html.
    """
    import torch

    from ..hf.heal import HealSpec, keep_freed_memory
    from ..hf.heal import heal as run

    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    spec = HealSpec(
        converted=converted,
        teacher=teacher,
        text=tuple(text),
        valid=valid,
        test=tuple(test or ()),
        what=what,
        lora=lora,
        steps=steps,
        minutes=minutes,
        tokens=tokens,
        micro_tokens=max(context, min(micro_tokens, tokens)),
        context=context,
        learning_rate=learning_rate,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip or None,
        temperature=temperature,
        kl_weight=kl_weight,
        hidden_weight=hidden_weight,
        layers=layers if layers in ("all", "none") else tuple(part.strip() for part in layers.split(",")),
        dtype=dtype,
        validations=validations,
        valid_tokens=valid_tokens,
        test_tokens=test_tokens,
        test_window=test_window,
        keep=keep,
        seed=seed,
    )
    result = run(spec, out, overwrite=overwrite)
    if as_json:
        print_json({key: value for key, value in result.items() if key != "test_windows"})
    else:
        say(_summary(result, out))
    if result["status"] != "complete":
        raise typer.Exit(INTERRUPTED)


def _summary(result: dict[str, Any], out: Path) -> str:
    from ..hf.heal.card import card_section

    head = f"{result['status']} after {result['steps']} steps, in {out}"
    return head if result["status"] != "complete" else f"{head}\n{card_section(result)}"
