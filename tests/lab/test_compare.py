"""Comparisons from recipe to page: with invented runs, and once with real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from qvattn.cli import main
from qvattn.errors import UserError
from qvattn.lab import compare as lab
from qvattn.train.recipe import Recipe, load_recipe

HERE = Path(__file__).parent


def write_recipe(path: Path, names: tuple[str, ...] = ("QKV", "QV"), **compare: Any) -> Path:
    variants = [{"name": name, "attention": "qv" if name == "QV" else "qkv"} for name in names]
    grid = {"baseline": names[0], "seeds": [1, 2], "variants": variants, **compare}
    content = {
        "name": "tiny",
        "data": {"corpus": "verses", "vocab_size": 300},
        "train": {"steps": 6, "warmup_steps": 2},
        "compare": grid,
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(write_recipe(tmp_path / "tiny.yaml", ("QKV", "QV", "QV-Ka 2x")))


def test_choose_narrows_and_widens(recipe: Recipe) -> None:
    grid = lab.choose(recipe, variants=["qv-ka-2x", "QKV"], seeds=3, jobs=2, threads=1).compare
    assert grid is not None
    assert [variant.name for variant in grid.variants] == ["QKV", "QV-Ka 2x"]
    assert grid.seeds == (1, 2, 3)
    assert (grid.jobs, grid.threads, grid.baseline) == (2, 1, "QKV")
    assert lab.choose(recipe, seeds=1).compare.seeds == (1,)  # type: ignore[union-attr]
    assert lab.choose(recipe, baseline="qv").compare.baseline == "QV"  # type: ignore[union-attr]
    threads = lab.choose(recipe, jobs=1).compare.threads  # type: ignore[union-attr]
    assert threads == lab.processors()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variants": ["nobody"]}, "variant 'nobody' is not in recipe 'tiny'; allowed: QKV, QV, QV-Ka 2x"),
        ({"variants": ["QV"]}, "baseline 'QKV' is not among the variants"),
        ({"baseline": "nobody"}, "baseline 'nobody' is not among the variants"),
        ({"seeds": 0}, "seeds must be at least 1, not 0"),
        ({"jobs": -1}, "jobs must be at least 1, not -1"),
    ],
)
def test_choose_refuses(recipe: Recipe, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lab.choose(recipe, **options)


def test_choose_needs_a_grid(recipe: Recipe) -> None:
    with pytest.raises(UserError, match="no `compare` section"):
        lab.choose(recipe.model_copy(update={"compare": None}))


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are invented instead of trained."""
    script = str(HERE / "fake_train.py")
    monkeypatch.setattr(lab, "train_command", lambda plan, run: (sys.executable, script, str(plan), str(run)))


@pytest.mark.usefixtures("invented")
def test_command_from_recipe_to_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write_recipe(tmp_path / "tiny.yaml"), tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/qvattn", "compare", str(path)])
    assert main(["compare", str(path), "--out", str(out), "--jobs", "2", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result == json.loads((out / "compare.json").read_text())
    assert [row["name"] for row in result["rows"]] == ["QKV", "QV"]
    assert result["rows"][1]["difference"]["mean"] == pytest.approx(-0.01)
    assert result["rows"][1]["difference"]["count"] == 2
    assert result["provenance"]["command"].startswith("qvattn ")
    assert result["provenance"]["versions"]["torch"] == "2.13.0"
    assert "4 of 4 runs done" in printed.err or "done in" in printed.err
    assert "| QV | 48.15 ± " in (out / "compare.md").read_text()
    assert "Difference to QKV" in (out / "compare.html").read_text()

    # the same command again trains nothing; another seed trains only what is new
    assert main(["compare", str(path), "--out", str(out), "--seeds", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("complete already, kept") == 4
    assert printed.err.count("starts") == 2
    assert "QV" in printed.out
    assert "±" in printed.out

    # from scratch on request
    assert main(["compare", str(path), "--out", str(out), "--overwrite"]) == 0
    assert capsys.readouterr().err.count("starts") == 4


@pytest.mark.usefixtures("invented")
def test_runs_of_another_recipe_are_never_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write_recipe(tmp_path / "tiny.yaml"), tmp_path / "out"
    assert main(["compare", str(path), "--out", str(out), "--seeds", "1"]) == 0
    before = (out / "compare.yaml").read_text()
    assert main(["compare", str(path), "train.steps=8", "--out", str(out), "--seeds", "1"]) == 2
    error = capsys.readouterr().err
    assert "another recipe" in error
    assert "train.steps" in error
    assert (out / "compare.yaml").read_text() == before
    assert main(["compare", str(path), "--out", str(out), "--seeds", "1", "--threads", "1"]) == 0  # harmless change


@pytest.mark.usefixtures("invented")
def test_foreign_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write_recipe(tmp_path / "tiny.yaml"), tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    assert main(["compare", str(path), "--out", str(out)]) == 2
    assert "holds 'thesis.txt' and no comparison" in capsys.readouterr().err
    assert main(["compare", str(path), "--out", str(path)]) == 2
    assert "is a file" in capsys.readouterr().err


@pytest.mark.usefixtures("invented")
def test_failed_run_is_named_and_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write_recipe(tmp_path / "tiny.yaml", ("QKV", "bad <one>")), tmp_path / "out"
    assert main(["compare", str(path), "--out", str(out), "--seeds", "1", "--json"]) == 1
    printed = capsys.readouterr()
    (failed,) = json.loads(printed.out)["failed"]
    assert (failed["name"], failed["seed"]) == ("bad <one>", 1)
    assert failed["reason"] == "exit code 2; last log line: qvattn: error: n_heads must divide d_model"
    assert "failed: bad <one>, seed 1: exit code 2" in printed.err
    page = (out / "compare.html").read_text()
    assert "bad &lt;one&gt;" in page
    assert "bad <one>" not in page
    # the report made later tells of the failure too
    assert main(["report", str(out), "-o", str(tmp_path / "report.html"), "--json"]) == 0
    (later,) = json.loads(capsys.readouterr().out)
    assert later["failed"] == [failed]


def _tiny_corpus(root: Path) -> None:
    words = ["der", "hund", "die", "katze", "das", "haus", "ein", "baum", "sieht", "mag", "findet", "kennt"]
    english = ["the", "dog", "she", "cat", "it", "house", "a", "tree", "sees", "likes", "finds", "knows"]
    lines = [
        (
            " ".join(words[(i * 7 + j * 3) % 12] for j in range(4)),
            " ".join(english[(i * 7 + j * 3) % 12] for j in range(4)),
        )
        for i in range(120)
    ]
    for split, part in (("train", lines[:96]), ("valid", lines[96:])):
        (root / f"{split}.de").write_text("\n".join(source for source, _ in part) + "\n")
        (root / f"{split}.en").write_text("\n".join(target for _, target in part) + "\n")


def _real_recipe(root: Path) -> Path:
    _tiny_corpus(root)
    sides = {"source": "de", "target": "en"}
    files = {
        f"{split}_{side}": str(root / f"{split}.{end}") for split in ("train", "valid") for side, end in sides.items()
    }
    content = {
        "name": "real tiny",
        "data": {"corpus": "files", "vocab_size": 280, "max_tokens": 200, **files},
        "model": {"d_model": 16, "d_ff": 32, "n_heads": 2, "encoder_layers": 1, "decoder_layers": 1},
        "train": {"steps": 8, "warmup_steps": 2, "validate_every": 4, "report_every": 2, "tensorboard": False},
        "compare": {
            "baseline": "QKV",
            "seeds": [1, 2],
            "jobs": 2,
            "threads": 1,
            "variants": [
                {"name": "QKV", "attention": "qkv"},
                {"name": "QV", "attention": "qv"},
            ],
        },
    }  # fmt: skip
    path = root / "real.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


KILLED_HALFWAY = """
    import os, signal, sys
    from qvattn.train.recipe import load_recipe
    from qvattn.train.run import run_training
    run_training(load_recipe(sys.argv[1]), sys.argv[2], stop_at=4)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_real_grid_goes_on_after_a_killed_and_a_failed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = _real_recipe(tmp_path), tmp_path / "out"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    ordinary = lab.train_command

    def spoilt(plan: Path, directory: Path) -> tuple[str, ...]:
        if plan.stem == "qkv--seed1":
            return (sys.executable, "-c", textwrap.dedent(KILLED_HALFWAY), str(plan), str(directory))
        if plan.stem == "qv--seed2":
            return ordinary(plan.with_name("missing.yaml"), directory)
        return ordinary(plan, directory)

    monkeypatch.setattr(lab, "train_command", spoilt)
    assert main(["compare", str(recipe), "--out", str(out), "--json"]) == 1
    first = json.loads(capsys.readouterr().out)
    failed = {(run["name"], run["seed"]): run["reason"] for run in first["failed"]}
    assert set(failed) == {("QKV", 1), ("QV", 2)}
    assert "SIGKILL" in failed["QKV", 1]
    assert "exit code 2; last log line: qvattn: error: recipe" in failed["QV", 2]
    assert "missing.yaml" in failed["QV", 2]
    assert [row["seeds"] for row in first["rows"]] == [[2], [1]]
    assert first["rows"][1]["difference"] is None  # no seed in common

    monkeypatch.setattr(lab, "train_command", ordinary)
    assert main(["compare", str(recipe), "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    assert "QKV, seed 1: resumes at step 4" in printed.err
    assert printed.err.count("kept") == 2
    second = json.loads(printed.out)
    assert second["failed"] == []
    assert [row["seeds"] for row in second["rows"]] == [[1, 2], [1, 2]]
    base, row = second["rows"]
    assert row["cache_share"] == 0.5
    assert row["parameters_attention"] < base["parameters_attention"]
    differences = [row["per_seed"][seed] - base["per_seed"][seed] for seed in ("1", "2")]
    assert row["difference"]["mean"] == pytest.approx(sum(differences) / 2)


def test_interrupted_command_stops_its_runs(tmp_path: Path) -> None:
    """SIGTERM to the command: exit code 130, no child left, the lock is free."""
    recipe, out = write_recipe(tmp_path / "tiny.yaml"), tmp_path / "out"
    script = f"""
        import sys, qvattn.lab.compare as lab
        from qvattn.cli import main
        lab.train_command = lambda plan, directory: (sys.executable, "-S", "-c", "import time; time.sleep(60)")
        sys.exit(main(["compare", {str(recipe)!r}, "--out", {str(out)!r}]))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "starts" in line:
            break
    process.terminate()
    said = process.stderr.read()
    assert process.wait(20) == 130
    assert "the same command goes on from there" in said
    with lab.exclusive(out):  # raises if a child still held the directory
        pass
