"""Names from recipes, archives and links do not lead out of the run directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from faults.record import count
from qvattn.cli import main
from qvattn.errors import UserError
from qvattn.lab.check.loading import load
from qvattn.lab.grid import exclusive
from qvattn.train.checkpoint import find_checkpoint
from qvattn.train.recipe import expand, slugify
from qvattn.train.run import run_training
from train.conftest import MakeRecipe

NAMES = [
    "../../x",
    "/etc/passwd",
    "..",
    ".",
    "a/b",
    "a\\b",
    "C:\\x",
    "~",
    "$HOME",
    "a b",
    "Ünïcödé",
    "名前",
    "-rf",
    "x" * 120,
]
REFUSED = ["", "x" * 121, "a\nb", "a\x1b[31mb", "a\x00b", "a\u2028b", "\u202eabc"]


@pytest.mark.parametrize("name", NAMES)
def test_name_of_a_recipe_stays_a_name(
    toy_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    work = tmp_path / "a" / "b" / "work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    assert main(["train", str(toy_file), f"name={json.dumps(name)}", "train.steps=0"]) == 2
    assert "train.steps" in name or not list(work.iterdir())
    slug = slugify(name)
    assert (Path("runs") / slug).parent == Path("runs")
    assert slug not in ("", ".", "..")
    assert len(slug.encode()) <= 120
    count("names that try to leave the run directory", "stay names")


@pytest.mark.parametrize("name", REFUSED)
def test_name_that_is_no_name_is_refused(toy: MakeRecipe, name: str) -> None:
    with pytest.raises(UserError, match="name"):
        toy(f"name={json.dumps(name)}")
    count("names that try to leave the run directory", "refused")


@given(st.text(max_size=130))
def test_slug_is_one_plain_path_part(name: str) -> None:
    slug = slugify(name)
    assert slug.replace("-", "").isalnum() and slug.isascii() and slug == slug.lower()


def test_variants_become_plain_directories(toy: MakeRecipe) -> None:
    variants = json.dumps([{"name": "../../evil"}, {"name": "/tmp/x"}])
    recipe = toy(f'compare={{"baseline": "../../evil", "seeds": [1], "variants": {variants}}}')
    assert [plan.slug for plan in expand(recipe)] == ["evil--seed1", "tmp-x--seed1"]


def test_links_of_a_run_directory_are_not_followed(toy: MakeRecipe, tmp_path: Path) -> None:
    """A run directory that somebody prepared: what its links point to is neither written nor deleted."""
    recipe = toy("train.steps=2")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("recipe", "tokenizer", "history", "lock"):
        (outside / name).write_text("precious")
    (outside / "step-0000009").mkdir()
    (outside / "step-0000009/state.json").write_text("{}")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".recipe.yaml.draft").symlink_to(outside / "recipe")
    (run / ".tokenizer.json.draft").symlink_to(outside / "tokenizer")
    (run / ".history.csv.draft").symlink_to(outside / "history")
    assert run_training(recipe, run)["status"] == "complete"
    for name in ("tokenizer.json", "history.csv", "results.json", "recipe.yaml"):
        (run / name).unlink()
        (run / name).symlink_to(outside / "recipe")
    (run / "checkpoints/step-0000009").symlink_to(outside / "step-0000009")
    assert run_training(recipe, run, overwrite=True)["status"] == "complete"
    assert {path.read_text() for path in outside.iterdir() if path.is_file()} == {"precious"}
    assert (outside / "step-0000009/state.json").is_file()
    count("links out of the run directory", "not followed")


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_directories_that_are_links_are_refused(toy: MakeRecipe, tmp_path: Path, name: str) -> None:
    recipe = toy("train.steps=2")
    run_training(recipe, tmp_path / "run", stop_at=1)
    shutil.copytree(tmp_path / "run/checkpoints", tmp_path / "other")
    shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "other")
    before = sorted(path.name for path in (tmp_path / "other").iterdir())
    with pytest.raises(UserError, match=f"{name} is a link .* outside"):
        run_training(recipe, tmp_path / "run", resume=True)
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == before
    count("links out of the run directory", "refused")


def test_lock_that_is_a_link_is_refused(toy: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in ("run", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="remove the link"):
        run_training(toy("train.steps=1"), tmp_path / "run")
    with pytest.raises(UserError, match="remove the link"), exclusive(tmp_path / "out"):
        pass
    assert (tmp_path / "precious").read_text() == "precious"
    count("links out of the run directory", "refused", 2)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", 3, ""])
def test_index_of_weights_names_files_beside_it(toy: MakeRecipe, tmp_path: Path, name: object) -> None:
    run_training(toy("train.steps=1"), tmp_path / "run")
    folder = find_checkpoint(tmp_path / "run")
    save_file({"x": torch.zeros(1)}, folder.parent / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(UserError):
        load(folder)
    count("names that try to leave the run directory", "refused")
