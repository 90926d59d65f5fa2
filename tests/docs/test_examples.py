"""The documentation's examples: Python is run, quick commands are run, all others are held against the command line,
the recipes and the files that they name, so that a renamed option fails here before it misleads a reader."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qvattn import cli
from qvattn.lab.family import family
from qvattn.train.recipe import load_recipe, shipped_recipes

from .pages import PAGES, ROOT, Block, Command, blocks, commands

PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*(\.\.\.|…)?|<.*>|\.\.\.|…|.*\$.*")
QUICK = ("variants", "explain", "plan")
"""Commands that are run as they stand, unless they name something that the reader brings."""
PYTHON_PAGES = sorted({block.page for block in blocks("python")})
COMMANDS = commands("qvattn")


def test_there_is_something_to_test() -> None:
    assert len(blocks("python")) >= 2
    assert len(COMMANDS) >= 15


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which a reader tries the examples. In it `path/of/a/model` is a small square GPT-2, and
    `smollm2-g64` a language model of ours with a tokenizer, both untrained."""
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from qvattn.models import CausalLM, CausalLMConfig

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "path/of/a/model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    own = CausalLM(CausalLMConfig(vocab_size=50, d_model=16, d_ff=32, n_heads=2, layers=1))
    own.save_pretrained(tmp_path / "smollm2-g64")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path / "smollm2-g64")
    return tmp_path


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, reader: Path) -> None:
    """In a process of their own, as a reader would; the blocks of a page build on each other."""
    code = "\n".join(b.text for b in blocks("python") if b.page == page and not b.not_run)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_blocks_are_python(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_exist_with_these_options(command: Command) -> None:
    name, *arguments = command.words[1:] or ("--help",)
    if name.startswith("-"):
        assert name in ("--help", "-h", "--version")
        return
    if PLACEHOLDER.fullmatch(name):
        return
    assert name in cli.COMMANDS, f"{command}: no such command"
    if not arguments and command.mentioned:
        return  # the text speaks of the command, it does not call it
    values = _parsed(name, arguments, command)
    if name in ("train", "compare", "demo"):
        _check_recipe(values, name)


def _parsed(name: str, arguments: list[str], command: Command) -> dict[str, Any]:
    """The parameters as the command would receive them; a placeholder for a number is taken as 1."""
    loaded, words = cli.load_command(name), list(arguments)
    # dots at the end that stand for further options
    more = len(words) > 1 and words[-1] in ("...", "…") and not words[-2].startswith("-")
    if more:
        words.pop()
    while True:
        try:
            return loaded.make_context(name, list(words)).params
        except Exception as error:
            said = error.format_message() if hasattr(error, "format_message") else str(error)
            if "does not exist" in said and any(repr(word) in said for word in words):
                return {}  # a file of the reader's
            if "does not exist" in said and any(PLACEHOLDER.fullmatch(word) for word in words):
                return {}
            if more and said.startswith("Missing option"):
                return {}
            options = [word for word in words if f"'{word}'" in said and word in words[:-1]]
            value = words.index(options[0]) + 1 if options else 0
            if not (options and PLACEHOLDER.fullmatch(words[value])):
                pytest.fail(f"{command}: {said}")
            words[value] = "1"


def _given(value: Any) -> list[str]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, str)]


def _check_recipe(values: dict[str, Any], name: str) -> None:
    """The recipe is one that comes with the package, and its changes are valid."""
    recipe = "demo" if name == "demo" else values.get("recipe")
    overrides = [o for o in _given(values.get("overrides")) if "=" in o]
    if recipe in shipped_recipes():
        load_recipe(recipe, [o for o in overrides if not PLACEHOLDER.fullmatch(o.partition("=")[2])])
    else:
        assert recipe is None or PLACEHOLDER.fullmatch(recipe) or recipe.endswith((".yaml", ".yml"))


def _runs_quickly(command: Command) -> bool:
    words = command.words[1:]
    return bool(words) and words[0] in QUICK and not command.not_run and not any(_is_of_reader(w) for w in words[1:])


def _is_of_reader(word: str) -> bool:
    """A placeholder, or a path or hub name that only the reader has."""
    return bool(PLACEHOLDER.fullmatch(word)) or ("/" in word and "=" not in word) or word.endswith((".json", ".yaml"))


QUICK_COMMANDS = list({command.words: command for command in COMMANDS if _runs_quickly(command)}.values())


@pytest.mark.parametrize("command", QUICK_COMMANDS, ids=str)
def test_quick_commands_run(command: Command, capsys: pytest.CaptureFixture[str], reader: Path) -> None:
    assert cli.main(command.words[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", commands("make"), ids=str)
def test_make_targets_exist(command: Command) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in command.words[1:] if "=" not in word} <= targets


SCRIPTS = sorted(
    {
        (name, tuple(re.findall(r"--[a-z][a-z-]*", options)))
        for page in PAGES
        for name, options in re.findall(r"`?(benchmarks/\w+\.py)((?: [^`\n|]*)?)", page.read_text())
    }
)


@pytest.mark.parametrize(("name", "options"), SCRIPTS)
def test_scripts_exist_with_these_options(name: str, options: tuple[str, ...]) -> None:
    assert (ROOT / name).exists()
    text = (ROOT / name).read_text()
    assert [o for o in options if f'"{o}"' not in text and f'"{o[2:]}"' not in text] == []


@pytest.mark.parametrize("page", [ROOT / "README.md"], ids=lambda page: page.name)
def test_links_of_the_readme_lead_somewhere(page: Path) -> None:
    """Those of docs/ are checked by the strict build of the site."""
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_names_every_command_and_every_results_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in cli.COMMANDS if f"`qvattn {name}" not in text] == []
    pages = [str(p.relative_to(ROOT)) for p in (ROOT / "docs/results").glob("*.md")]
    rows = [line for line in text.splitlines() if line.startswith("| [docs/")]
    assert [page for page in pages if not any(f"({page})" in row for row in rows)] == [], "how to reproduce them?"


def test_the_readme_has_the_table_of_variants_that_is_computed() -> None:
    text = (ROOT / "README.md").read_text()
    table = family(4096, 32, dtype=torch.bfloat16)
    cells = {r.variant: f"{r.cache_bytes_per_token:,} B" for r in table.rows}
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `") and " B" in line]
    shown = {
        name: size.strip()
        for row in rows
        for name, size in zip(re.findall(r"`([\w-]+)`(?! *\))", row[0]), row[3].split(", "), strict=False)
    }
    assert {name: shown.get(name) for name in cells} == cells


def test_lists_of_the_docstrings() -> None:
    pytest.importorskip("griffe")
    code = (
        "import sys; sys.path.insert(0, 'docs'); from docstrings import with_lists; print(with_lists(sys.stdin.read()))"
    )
    text = "What it is.\n\nx: one\ngoes on.\ny, z (B, T): two\n\nRaises UserError: no."
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input=text, capture_output=True, text=True, check=True
    )
    assert done.stdout.rstrip() == (
        "What it is.\n\n- `x`: one\n  goes on.\n- `y`, `z` (B, T): two\n\nRaises UserError: no."
    )
