"""What the README and the pages of docs/ promise: their code blocks and the commands they name."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("bash", "console", "sh", "shell")
NOT_RUN = re.compile(r"<!--\s*not run: (?P<reason>.+?)\s*-->\s*\Z")
"""Before a block, in the page: why the tests cannot run it (a big download, hours)."""

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```\s*$", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`(qvattn [^`\n]+)`(?!`)")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: the page it stands on, its line there, and why it must not be run, if so."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command line as a page shows it; mentioned: in the text, not in a block."""

    page: Path
    line: int
    words: tuple[str, ...]
    mentioned: bool = False
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line} {shlex.join(self.words)}"


def blocks(*languages: str) -> list[Block]:
    """The fenced blocks of `languages`, page by page, in order."""
    return [block for page in PAGES for block in _blocks(page) if block.language in languages]


def commands(program: str) -> list[Command]:
    """Every command line that starts with `program`: in shell blocks and, for qvattn, in code spans of the text."""
    found = [
        Command(page=block.page, line=block.line + offset, words=words, not_run=block.not_run)
        for block in blocks(*SHELL, "")
        for offset, words in _shell_lines(block.text)
        if words[0] == program
    ]
    if program == "qvattn":
        for page in PAGES:
            prose = _FENCE.sub(lambda m: "\n" * m[0].count("\n"), page.read_text())
            found += [
                Command(page=page, line=prose.count("\n", 0, span.start()) + 1, words=words, mentioned=True)
                for span in _SPAN.finditer(prose)
                if (words := _words(span[1]))
            ]
    return found


def _blocks(page: Path) -> list[Block]:
    text = page.read_text()
    result = []
    for match in _FENCE.finditer(text):
        note = NOT_RUN.search(text[: match.start()])
        indent = len(match["indent"])
        result.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start()) + 1,
                language=match["language"],
                text="".join(line[indent:] for line in match["text"].splitlines(keepends=True)),
                not_run=note["reason"] if note else None,
            )
        )
    return result


def _shell_lines(text: str) -> list[tuple[int, tuple[str, ...]]]:
    """(line, words) of every simple command of a shell block; continuations joined, prompts and comments dropped."""
    found = []
    joined = re.sub(r"\\\n", lambda _: " \0 ", text)
    line = 1
    for raw in joined.splitlines():
        stripped = raw.replace("\0", " ").strip().removeprefix("$ ")
        for part in re.split(r"\s(?:&&|\|\||\||;)\s", stripped):
            if words := _words(part):
                found.append((line, words))
        line += 1 + raw.count("\0")
    return found


def _words(text: str) -> tuple[str, ...]:
    """The words of a command as it would be called: what is optional in the text (in brackets), comments,
    redirections and variables set before it are left out."""
    text = re.sub(r"(?<=\s)\[[^]]*\](?=\s|$)", "", text)
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return ()
    while words and (re.fullmatch(r"[A-Z_]+=\S*", words[0]) or words[0] in ("env", "sudo", "nice")):
        words.pop(0)
    for i, word in enumerate(words):
        if re.fullmatch(r"\d?>{1,2}(&\d)?|<|&|\d?>{1,2}\S+", word):
            words = words[:i]
            break
    if words and "/" in words[0] and words[0].startswith(".venv/bin/"):
        words[0] = words[0].removeprefix(".venv/bin/")
    for i in range(len(words) - 1):  # python -m, torchrun ... -m, srun torchrun ... -m, accelerate launch ... -m
        if words[i : i + 2] == ["-m", "qvattn.cli"]:
            words[: i + 2] = ["qvattn"]
            break
    return tuple(words)
