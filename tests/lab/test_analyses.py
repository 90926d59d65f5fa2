"""The report shows analyses that lie beside the runs, refuses what they are not, and stays alive in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes import write_comparison

from qvattn import Attention, AttentionSpec
from qvattn.cli import main
from qvattn.errors import UserError
from qvattn.lab import analyses, operators, page
from qvattn.lab.recall import RecallRow
from qvattn.lab.recall_page import section, write_page
from qvattn.lab.statistics import estimate
from qvattn.models.block import initialise

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><img src=x onerror=alert(1)> & 'x'"


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("analyses") / "grid"
    write_comparison(root, {"QKV": (0.49, 1024), "QV": (0.48, 512)}, baseline="QKV", title="grid")
    layers = [Attention(AttentionSpec(variant="gqa", d_model=16, n_heads=4, k_heads=2, v_heads=2)) for _ in range(2)]
    for layer in layers:
        initialise(layer, seed=1)
    found = operators.measure({"decoder": layers}, name=HOSTILE, sizes=[2])
    (root / "operators.json").write_text(json.dumps(found))
    return root


def rows() -> list[RecallRow]:
    accuracy = {HOSTILE: {1: 0.26, 2: 0.999, 3: 0.27}, "mha": {1: 1.0, 2: 0.998, 3: 0.999}}
    return [
        RecallRow(
            name=name,
            cache_elements=64,
            chance=0.25,
            accuracy=values,
            solved_at={2: 300},
            mean=estimate(list(values.values())),
        )
        for name, values in accuracy.items()
    ]


def test_the_report_shows_what_lies_beside_the_runs(grid: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    assert main(["report", str(grid), "-o", str(output)]) == 0
    text = output.read_text()
    assert 'data-analysis="operators"' in text and "gqa keys, 2 groups" in text
    assert "<img" not in text.replace("\\u003c", "")
    assert text.count('id="analysis-') == 1
    (found,) = analyses.sections([grid, grid])
    assert found.kind == "operators"


@pytest.mark.parametrize("name", ["affinity", "diffusion", "distance", "extrapolation", "operators"])
def test_a_file_that_is_something_else_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_comparison(tmp_path / "grid", {"QKV": (0.49, 1024)}, baseline="QKV", title="grid")
    (tmp_path / "grid" / f"{name}.json").write_text('{"runs": [{"name": 3}], "summary": 7, "baseline": []}')
    assert main(["report", str(tmp_path / "grid"), "-o", str(tmp_path / "r.html")]) == 2
    assert f"{name}.json" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_recall_shows_every_seed(tmp_path: Path) -> None:
    one = section(rows())
    assert one.html.count("1 of 3") == 1 and one.html.count("3 of 3") == 1 and "26.0" in one.html
    write_page(rows(), tmp_path / "a" / "recall.html", title="Recall")
    text = (tmp_path / "a" / "recall.html").read_text()
    assert "<img" not in text.replace("\\u003c", "") and "default-src &#x27;none" in text


def test_cells_and_tables_escape() -> None:
    html = page.table("a", [HOSTILE], [[page.words(HOSTILE)]])
    assert "<img" not in html
    assert page.number(None).text == "–" and page.number(estimate([1.0, 3.0])).text.startswith("2.00 <small>± ")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_pictures_are_drawn_and_tables_sort(grid: Path, tmp_path: Path) -> None:
    """In a browser: a script that fails would leave its mark in the title, and no plot."""
    output = tmp_path / "report.html"
    sections = [*analyses.sections([grid]), section(rows())]
    watch = (
        "<script>addEventListener('error',e=>{document.title='failed: '+e.message});"
        "addEventListener('load',()=>{const b=document.querySelector('[data-analysis] thead button');b.click();"
        "const t=b.closest('table');document.title=document.title.startsWith('failed')?document.title:"
        "'plots '+document.querySelectorAll('.main-svg').length+' sorted '+b.parentElement.getAttribute('aria-sort')})"
        "</script>"
    )
    text = page.build("page", "lead", sections).replace("<style>", watch + "<style>", 1)
    output.write_text(text)
    command = [
        CHROMIUM or "",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=9000",
        "--dump-dom",
    ]
    done = subprocess.run([*command, output.as_uri()], capture_output=True, text=True, timeout=180, check=True)
    title = done.stdout.split("<title>")[1].split("</title>")[0]
    assert title.startswith("plots ") and int(title.split()[1]) >= 4, title
    assert title.endswith("sorted ascending"), title


def test_wrong_directories() -> None:
    with pytest.raises(UserError):
        analyses.sections([Path("/nonexistent")])
