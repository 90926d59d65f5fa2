"""HTML pages show what data brings as text: the page of hostile data has the structure of any other."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fakes import write_run

from faults.record import count
from qvattn.lab.experiment import load_experiments
from qvattn.lab.report import build_page, write_report
from qvattn.lab.table import markdown

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"><svg onload='alert(1)'>",
    "' onmouseover='alert(1)",
    "<!--",
    "]]>",
    "&lt;b&gt;&amp;",
    "${alert(1)} `x` \\u003c",
    "</title></style></pre><h1>",
    "javascript:alert(1)",
    "| a | b |",
    "%{x}<extra></extra><a href=javascript:alert(1)>",
]


class Structure(HTMLParser):
    """Tags with the names of their attributes, and the content of scripts and styles, in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[Any] = []
        self.data = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = tuple(name for name, _ in attributes)
        assert not any(name.startswith("on") for name in names), (tag, attributes)
        assert not names_code(attributes), (tag, attributes)
        self.found.append((tag, names))
        self._inside = "data" if ("type", "application/json") in attributes else tag

    def handle_endtag(self, tag: str) -> None:
        self.found.append(tag)
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside in ("script", "style"):
            self.found.append(hash(data))

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data[:60]!r}")


def names_code(attributes: list[tuple[str, str | None]]) -> bool:
    links = [(value or "").strip().lower() for name, value in attributes if name in ("href", "src", "action", "srcset")]
    return any(not link.startswith(("#", "data:image/")) for link in links)


def runs(root: Path, names: list[str], text: str) -> Path:
    """A comparison whose every text is `text`."""
    for number, name in enumerate(names):
        run = write_run(root / "runs" / f"v{number}--seed1", name=name, seed=1, accuracy=0.4 + 0.01 * number)
        for file in ("recipe.yaml", "environment.json", "results.json"):
            content = json.loads((run / file).read_text()) if file.endswith("json") else None
            if content is not None:
                (run / file).write_text(json.dumps(spoiled(content, text)))
        recipe = {"name": name, "data": {"corpus": text, text or "x": text}, "train": {"seed": 1, "note": text}}
        (run / "recipe.yaml").write_text(json.dumps(recipe))
    grid = {"variants": [{"name": name} for name in names], "baseline": names[0], "seeds": [1]}
    (root / "compare.yaml").write_text(json.dumps({"name": text, "compare": grid}))
    failed = [{"name": text, "seed": 1, "directory": text, "log": text, "reason": text}]
    written = {"title": text, "failed": failed, "provenance": {"command": text, "versions": {"torch": text}}}
    (root / "compare.json").write_text(json.dumps(written))
    return root


def spoiled(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: value[key] if key in ("status", "name", "seed") else spoiled(value[key], text) for key in value}
    return text if isinstance(value, str) else value


@pytest.mark.parametrize("text", HOSTILE)
def test_report_of_hostile_data(tmp_path: Path, text: str) -> None:
    plain, hostile = (
        build_page(load_experiments([runs(tmp_path / str(i), [f"A {t}", f"B {t}"], t)]), title=t)
        for i, t in enumerate(("text", text))
    )
    expected, found = Structure(plain), Structure(hostile)
    assert found.found == expected.found
    assert json.loads(found.data)[0]["names"] == [f"A {text}", f"B {text}"]
    count("HTML pages with hostile text everywhere", "shown as text")


def test_page_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "report.html").symlink_to(tmp_path / "precious")
    write_report(load_experiments([runs(tmp_path / "c", ["A", "B"], "x")]), tmp_path / "report.html", title="x")
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_of_hostile_data(tmp_path: Path, text: str) -> None:
    """Every row of the table keeps its cells, and no line holds a tag."""
    (experiment,) = load_experiments([runs(tmp_path / "c", [f"A {text}", f"B {text}"], text)])
    page = markdown(experiment.comparison)
    rows = [line.replace("\\|", "") for line in page.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert not re.search(r"(?<!\\)<", page)
