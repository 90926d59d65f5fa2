"""A run that was stopped and resumed is the run that never stopped (CASES 13, 14)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qvattn.errors import UserError
from qvattn.train.checkpoint import find_checkpoint, last_checkpoint
from qvattn.train.history import read_history
from qvattn.train.recipe import Recipe
from qvattn.train.run import run_training

from .conftest import MakeRecipe

TIMED = {"seconds", "tokens_per_second", "train_tokens_per_second", "decode_tokens_per_second", "session_seconds"}


def timeless(value: Any) -> Any:
    """Everything but clocks."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMED}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def assert_same_run(left: Path, right: Path) -> None:
    a, b = find_checkpoint(left, "last"), find_checkpoint(right, "last")
    weights, others = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name
    moments, other_moments = last_checkpoint(left), last_checkpoint(right)
    assert moments is not None
    assert other_moments is not None
    states, other_states = moments.optimizer()["state"], other_moments.optimizer()["state"]
    for index, state in states.items():
        for key, tensor in state.items():
            assert torch.equal(tensor, other_states[index][key]), (index, key)
    for name in ("results.json",):
        one, two = (json.loads((run / name).read_text()) for run in (left, right))
        assert timeless(one) == timeless(two)
    assert timeless(read_history(left / "history.csv")) == timeless(read_history(right / "history.csv"))


def run_in_two_parts(recipe: Recipe, run_dir: Path, stop_at: int) -> dict[str, Any]:
    part = run_training(recipe, run_dir, stop_at=stop_at)
    assert (part["status"], part["steps"]) == ("interrupted", stop_at)
    return run_training(recipe, run_dir, resume=True)


@pytest.mark.parametrize(
    ("overrides", "stop_at"),
    [
        (("train.steps=10",), 4),
        (("train.steps=24", "train.validate_every=6"), 13),  # inside the second epoch
        (("train.steps=8", "train.accumulate=3", "train.schedule=cosine"), 4),  # groups that straddle epochs
        (("train.steps=6", "train.precision=bf16"), 2),
        (("train.steps=6", "train.precision=fp16"), 2),
    ],
)
def test_resumed_equals_uninterrupted(
    toy: MakeRecipe, tmp_path: Path, overrides: tuple[str, ...], stop_at: int
) -> None:
    recipe = toy(*overrides)
    whole = run_training(recipe, tmp_path / "whole")
    assert whole["status"] == "complete"
    assert recipe.model.dropout > 0
    run_in_two_parts(recipe, tmp_path / "parts", stop_at)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_step_13_lies_inside_the_second_epoch(toy: MakeRecipe, tmp_path: Path) -> None:
    run_training(toy("train.steps=24"), tmp_path / "run", stop_at=13)
    checkpoint = last_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    assert (checkpoint.state()["epoch"], checkpoint.state()["batch"] > 0) == (1, True)


def test_loss_scale_is_restored(toy: MakeRecipe, tmp_path: Path) -> None:
    recipe = toy("train.precision=fp16", "train.steps=6")
    run_training(recipe, tmp_path / "run", stop_at=3)
    checkpoint = last_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    path = checkpoint.path / "state.json"
    state = json.loads(path.read_text())
    assert state["scaler"]["scale"] == 65536.0
    state["scaler"] |= {"scale": 1024.0, "_growth_tracker": 7}
    path.write_text(json.dumps(state))
    (checkpoint.path / "SHA256SUMS").unlink()  # whoever replaces files replaces their sums
    run_training(recipe, tmp_path / "run", resume=True)
    final = last_checkpoint(tmp_path / "run")
    assert final is not None
    assert final.state()["scaler"]["scale"] == 1024.0
    assert final.state()["scaler"]["_growth_tracker"] == 10


def test_resume_without_checkpoint_starts_anew(toy: MakeRecipe, tmp_path: Path) -> None:
    recipe = toy("train.steps=4")
    run_training(recipe, tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "recipe.yaml").write_text((tmp_path / "whole" / "recipe.yaml").read_text())
    (tmp_path / "killed" / "history.csv").write_text("step,epoch\n3,0\n")
    run_training(recipe, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_resume_of_a_complete_run_returns_its_results(toy: MakeRecipe, tmp_path: Path) -> None:
    recipe = toy("train.steps=4")
    first = run_training(recipe, tmp_path / "run")
    assert run_training(recipe, tmp_path / "run", resume=True) == json.loads(json.dumps(first))


def test_history_is_cut_back_to_the_checkpoint(toy: MakeRecipe, tmp_path: Path) -> None:
    recipe = toy("train.steps=10", "train.save_every=4", "train.validate_every=100", "train.report_every=1")
    run_training(recipe, tmp_path / "whole")
    run_training(recipe, tmp_path / "run", stop_at=4)
    with (tmp_path / "run" / "history.csv").open("a") as file:  # as if killed at step 6, in the middle of a line
        file.write("5,0,1000,1.0,2.0,0.5,0.001,1.0,100,,,\n6,0,12")
    run_training(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_changed_recipe_is_refused_by_name(toy: MakeRecipe, tmp_path: Path) -> None:
    run_training(toy("train.steps=6"), tmp_path / "run", stop_at=2)
    changed = toy("train.steps=6", "model.d_ff=64", "train.learning_rate=0.02")
    with pytest.raises(UserError, match=r"model\.d_ff, train\.learning_rate"):
        run_training(changed, tmp_path / "run", resume=True)
    run_training(toy("train.steps=6", "train.threads=1"), tmp_path / "run", resume=True)


def test_changed_data_is_refused(toy: MakeRecipe, tmp_path: Path) -> None:
    recipe = toy("train.steps=6")
    run_training(recipe, tmp_path / "run", stop_at=2)
    source, target = Path(str(recipe.data.train_source)), Path(str(recipe.data.train_target))
    before = source.read_text(), target.read_text()
    try:
        source.write_text(before[0] + "the old man and the dog\n")
        target.write_text(before[1] + "x\n")
        with pytest.raises(UserError, match="training data changed"):
            run_training(recipe, tmp_path / "run", resume=True)
    finally:
        source.write_text(before[0])
        target.write_text(before[1])


def test_damaged_optimizer_file_is_named(toy: MakeRecipe, tmp_path: Path) -> None:
    recipe = toy("train.steps=6")
    run_training(recipe, tmp_path / "run", stop_at=2)
    checkpoint = last_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    file = checkpoint.path / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"optimizer\.pt is not what was written"):
        run_training(recipe, tmp_path / "run", resume=True)
