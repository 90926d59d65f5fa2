"""The command line's root: which commands exist, and how errors leave the process.

Each command is one module with one function; it is imported only when it is called, so `qvattn --help` stays
fast. Must never import a command, torch or transformers at start-up.

Exit codes: 0 success, 1 a failure while working, 2 bad usage or input, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
import typer.core
import typer.main

from qvattn import __version__
from qvattn.errors import UserError
from qvattn.files import explained

TRACEBACK_VARIABLE = "QVATTN_TRACEBACK"


class CommandEntry(NamedTuple):
    """Where a command lives (`module:function`) and the line that `--help` prints for it."""

    target: str
    summary: str


# A new command: one module and one line here.
COMMANDS: dict[str, CommandEntry] = {
    "demo": CommandEntry("qvattn.cli.demo:demo", "Train and compare four variants on the embedded text."),
    "train": CommandEntry("qvattn.cli.train:train", "Train one model from a recipe."),
    "compare": CommandEntry("qvattn.cli.compare:compare", "Train a grid of variants and seeds, and compare."),
    "export": CommandEntry("qvattn.cli.export:export", "Put a sharded checkpoint into one file."),
    "report": CommandEntry("qvattn.cli.report:report", "Make one HTML page from any set of runs."),
    "translate": CommandEntry("qvattn.cli.translate:translate", "Translate a text file with a trained run."),
    "generate": CommandEntry("qvattn.cli.generate:generate", "Continue a prompt with a trained language model."),
    "check": CommandEntry("qvattn.cli.check:check", "Check why cached decoding is right, on a trained model."),
    "explain": CommandEntry("qvattn.cli.explain:explain", "Walk one decoding step with every shape."),
    "convert": CommandEntry("qvattn.cli.convert:convert", "Convert a trained model to one that caches less."),
    "heal": CommandEntry("qvattn.cli.heal:heal", "Distil the original into a converted model."),
    "serve": CommandEntry("qvattn.cli.serve:serve", "Serve a language model over HTTP, OpenAI-compatible."),
    "plan": CommandEntry("qvattn.cli.plan:plan", "Plan memory and speed of a model and its conversions."),
    "affinity": CommandEntry("qvattn.cli.affinity:affinity", "Show what heads attend to, against a known grammar."),
    "diffusion": CommandEntry("qvattn.cli.diffusion:diffusion", "Show how diffusely heads match, and how well."),
    "operators": CommandEntry("qvattn.cli.operators:operators", "Show how much of a model's heads others represent."),
    "distance": CommandEntry("qvattn.cli.distance:distance", "Show how far heads look, and by which law it falls."),
    "extrapolate": CommandEntry("qvattn.cli.extrapolate:extrapolate", "Score models beyond the length of training."),
    "recall": CommandEntry("qvattn.cli.recall:recall", "Show which variants solved associative recall."),
    "bench": CommandEntry("qvattn.cli.bench:bench", "Time one decoded token beside PyTorch's attention."),
    "variants": CommandEntry("qvattn.cli.variants:variants", "What every variant caches and computes at a width."),
}


class LazyGroup(typer.core.TyperGroup):
    """A command group that lists its commands from `COMMANDS` and imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else typer.core.TyperCommand(cmd_name, help=entry.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and command.name in COMMANDS:
            command = load_command(command.name)
        return name, command, rest


def load_command(name: str) -> Any:
    """Import the module of command `name` and make its function a command."""
    entry = COMMANDS[name]
    module, _, attribute = entry.target.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, help=None if function.__doc__ else entry.summary)(function)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Attention that stops paying for keys: train, compare and measure attention variants.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"qvattn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; every error becomes one line on stderr.

    Args:
        arguments: what follows `qvattn`; the process's own arguments when None.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="qvattn")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except UserError as error:
        return _fail(error, f"qvattn: error: {error}", code=2)
    except KeyboardInterrupt:
        print("qvattn: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output has gone; keep the interpreter from flushing into the closed pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(error, f"qvattn: {explained(error)}", code=1)
    except Exception as error:
        text = str(error) or "no message"
        hint = "" if _wants_traceback() else f" (set {TRACEBACK_VARIABLE}=1 to see where)"
        return _fail(error, f"qvattn: {type(error).__name__}: {text}{hint}", code=1)
    return 0


def _fail(error: Exception, line: str, *, code: int) -> int:
    if _wants_traceback():
        traceback.print_exception(error)
    print(line, file=sys.stderr)
    return code


def _wants_traceback() -> bool:
    return os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")
