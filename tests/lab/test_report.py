"""The page: self-contained, escaped, and, where chromium is installed, alive."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fakes import write_comparison, write_run

from qvattn.cli import main
from qvattn.lab.experiment import load_experiments
from qvattn.lab.report import build_page

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"> & \"QV\" 'x' <b>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Elements(HTMLParser):
    """All elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("runs")
    variants = {"QKV": (0.49, 1024), HOSTILE: (0.48, 512), "QV-Ka 2x": (0.495, 576)}
    write_comparison(root / "grid", variants, baseline="QKV", title=f"grid {HOSTILE}")
    write_run(root / "single", name=f"single {HOSTILE}", seed=1, variant=HOSTILE)
    write_run(root / "begun", name="begun", seed=1, status="running", steps=(100, 200))
    return build_page(load_experiments([root]), title=f"Report {HOSTILE}")


def without_plotly(page: str) -> str:
    """The page without its longest script, which is plotly.js."""
    scripts = re.findall(r"<script>.*?</script>", page, flags=re.DOTALL)
    return page.replace(max(scripts, key=len), "")


def test_hostile_names_are_text(page: str) -> None:
    own = without_plotly(page)
    assert "<img" not in own
    assert own.count("</script>") == 2
    assert "&lt;/script&gt;&lt;img src=x" in own
    allowed = {"meta", "title", "style", "script"}
    elements = Elements(own).found
    assert not [tag for tag, _ in elements if tag in ("img", "b", "iframe", "link", "object")]
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
    assert allowed <= {tag for tag, _ in elements}


def test_pictures_are_parseable_and_complete(page: str) -> None:
    found = re.search(r'<script type="application/json" id="pictures">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    grid, singles = json.loads(found.group(1))
    assert grid["names"] == ["QKV", HOSTILE, "QV-Ka 2x"]
    assert [line["seeds"] for line in grid["curves"]["accuracy"]["lines"]] == [3, 3, 3]
    assert grid["curves"]["accuracy"]["lines"][0]["x"] == [100, 200, 300, 400, 500]
    assert [grid["pareto"]["points"][i]["index"] for i in grid["pareto"]["front"]] == [1, 2]
    assert [bar["index"] for bar in grid["differences"]] == [1, 2]
    assert singles["differences"] == []


def test_page_needs_nothing_from_outside(page: str) -> None:
    for _, attributes in Elements(without_plotly(page)).found:
        assert not {"src", "href"} & attributes.keys()
    assert "default-src 'none'" in page.replace("&#x27;", "'")


def test_page_tells_of_unfinished_runs_and_provenance(page: str) -> None:
    assert "1 not finished" in page
    assert "not finished" in page
    assert "0123456789" in page
    assert "torch 2.13.0" in page
    assert "batch_tokens: 2000" in page


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", name="QV", seed=1)
    output = tmp_path / "new" / "report.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(output), "--title", "Mine", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["rows"][0]["name"] == "QV"
    assert "<h1>Mine</h1>" in output.read_text()
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2


PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const table = document.querySelector("table.summary");
  const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
  const click = (column) => table.querySelectorAll("thead button")[column].click();
  const orders = [names()];
  for (const column of [1, 1, 1, 0]) { click(column); orders.push(names()); }
  const curves = document.querySelector("[data-picture=curves] .plot");
  const label = () => curves.querySelector(".ytitle").textContent;
  const labels = [label()];
  document.querySelector("[data-metric=difference]").click();
  setTimeout(() => {
    labels.push(label());
    parent.postMessage(JSON.stringify({
      orders, labels, errors: window.seen, title: document.title,
      plots: [...document.querySelectorAll(".plot .main-svg")].length,
      traces: document.querySelectorAll(".plot .scatterlayer .trace").length,
      legend: [...curves.querySelectorAll(".legendtext")].map((text) => text.textContent),
      overflow: document.documentElement.scrollWidth - innerWidth,
      figures: [...document.querySelectorAll("figure")].map((figure) => figure.dataset.picture),
    }), "*");
  }, 300);
}, 1000));
</script>
"""
WATCH = """<script>window.seen = [];
for (const kind of ["error", "unhandledrejection", "securitypolicyviolation"])
  addEventListener(kind, (event) => seen.push(`${kind}: ${event.message || event.reason || event.violatedDirective}`));
for (const kind of ["error", "warn"]) {
  const before = console[kind];
  console[kind] = (...words) => { seen.push(`${kind}: ${words.join(" ")}`); before(...words); };
}
</script>"""
FRAME = """<body style="margin:0"><pre id="probe"></pre><script>
addEventListener("message", (event) => { document.getElementById("probe").textContent = event.data; });
</script><iframe src="page.html" style="border:0;width:%dpx;height:900px"></iframe>"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [400, 1400])
def test_page_lives_in_a_browser(page: str, tmp_path: Path, width: int) -> None:
    """No errors or requests, sortable tables, all pictures drawn, nothing wider than the window."""
    probed = page.replace("<body>", f"<body>{WATCH}", 1).replace("</body></html>", f"{PROBE}</body></html>")
    (tmp_path / "page.html").write_text(probed)
    frame = tmp_path / "frame.html"  # a headless window itself is never as narrow as 400 pixels
    frame.write_text(FRAME % width)
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1500,1000", "--virtual-time-budget=8000",
        "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    probe = json.loads(found.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert probe["errors"] == []
    assert probe["title"] == f"Report {HOSTILE}"
    best_first = ["QV-Ka 2x", "QKV", HOSTILE]
    original = ["QKV", HOSTILE, "QV-Ka 2x"]
    assert probe["orders"][:4] == [original, best_first, best_first[::-1], original]
    assert sorted(probe["orders"][4]) == sorted(original)
    assert probe["labels"] == ["validation token accuracy %", "accuracy, difference to baseline"]
    assert probe["figures"] == ["curves", "pareto", "differences", "curves", "pareto"]
    assert probe["plots"] >= 5
    assert probe["traces"] > 10
    assert "QV-Ka 2x" in probe["legend"]
    assert probe["overflow"] <= 0
