"""The table on terminals of several widths."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from fakes import write_comparison
from rich.console import Console

from qvattn.lab.experiment import load_experiments
from qvattn.lab.table import terminal_table


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_fits_and_keeps_the_main_columns(tmp_path: Path, width: int) -> None:
    variants = {"QKV [bold]sinusoidal": (0.49, 1024), "QV": (0.48, 512)}
    (experiment,) = load_experiments([write_comparison(tmp_path / "grid", variants, baseline="QKV [bold]sinusoidal")])
    out = io.StringIO()
    Console(file=out, width=width).print(terminal_table(experiment.comparison, width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "QKV [bold]sinusoidal" in text
    assert " ± " in text
    assert ("more column" in text) == (width < 200)
    assert ("train tok/s" in text) == (width > 60)
