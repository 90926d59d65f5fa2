"""The tour: committed without outputs, and it runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import ROOT

TOUR = ROOT / "notebooks" / "tour.ipynb"
MINUTES = 5
"""What the notebook may take on a CPU; generous, since the machine may be busy."""


def test_it_is_committed_without_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = nbformat.read(TOUR, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(code) > 5
    for cell in code:
        assert cell.outputs == []
        assert cell.execution_count is None
        compile(cell.source, str(TOUR), "exec")


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    tour = nbformat.read(TOUR, as_version=4)
    nbclient.NotebookClient(tour, timeout=60 * MINUTES, kernel_name="python3").execute()  # raises where a cell does
    figures = [
        out for cell in tour.cells for out in cell.get("outputs", []) if "application/vnd.plotly.v1+json" in str(out)
    ]
    assert len(figures) >= 5
    assert not [out for cell in tour.cells for out in cell.get("outputs", []) if out.output_type == "error"]
    assert list(tmp_path.iterdir()) == [], "the tour leaves nothing behind"
