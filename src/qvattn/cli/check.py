"""`qvattn check`: why cached decoding is right, and why no query is cached, shown on a model. No logic of its own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qvattn.cli.output import print_json, say, stdout_console


class Which(StrEnum):
    """Which of a run's models."""

    best = "best"
    last = "last"


def check(
    model: Annotated[Path, typer.Argument(help="A run directory, one of its checkpoints, or a saved model.")],
    explain: Annotated[bool, typer.Option("--explain", help="Print shapes and a reason at every step.")] = False,
    source: Annotated[Path | None, typer.Option(help="Source sentences, in place of the run's own.")] = None,
    target: Annotated[Path | None, typer.Option(help="Their translations, line by line.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text for a language model, in place of the run's own.")] = None,
    only: Annotated[str | None, typer.Option(help="Only these checks, by name, with commas between.")] = None,
    sentences: Annotated[int, typer.Option(min=1, help="How many sentences.")] = 16,
    length: Annotated[int, typer.Option(min=5, help="The most tokens of a sentence.")] = 64,
    seed: Annotated[int, typer.Option(help="Of split points and random tokens.")] = 1,
    checkpoint: Annotated[Which, typer.Option(help="Which model of a run.")] = Which.best,
    device: Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON on stdout.")] = False,
) -> None:
    """Check statements about cached decoding on a trained model with real text.

    Decoding equals the full pass; past queries and scores are never read; history never changes; past scores do not
    give new ones; the far past matters; queries stay in their layer; memory is as predicted. Each is printed with its
    numbers. Exits with 1 if one fails.
    """
    from qvattn.lab.check import run_checks
    from qvattn.lab.check.loading import Texts, load_subject
    from qvattn.lab.check.report import report, summary

    subject = load_subject(
        model,
        texts=Texts(source=source, target=target, text=text),
        sentences=sentences,
        length=length,
        seed=seed,
        checkpoint=checkpoint.value,
        device=device,
    )
    tokens = sum(sample.length for sample in subject.samples)
    say(f"{subject.name}: {len(subject.samples)} sentences, {tokens:,} tokens of {subject.data}")
    console, results = stdout_console(), []
    for one in run_checks(subject, only=[name.strip() for name in (only or "").split(",") if name.strip()]):
        results.append(one)
        if not as_json:
            console.print(report(one, explain=explain))
    passed = all(one.passed for one in results)
    if as_json:
        spec = subject.model.attention_spec.model_dump(mode="json", exclude_none=True)
        facts = {"model": subject.name, "data": subject.data, "sentences": len(subject.samples), "tokens": tokens}
        print_json({**facts, "attention": spec, "passed": passed, "checks": [one.as_dict() for one in results]})
    else:
        console.print(summary(results))
    if not passed:
        raise typer.Exit(1)
