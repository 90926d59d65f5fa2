"""The loop's promises: normalisation per token, clipping, the dropout stream, best, last-N, early stopping, failure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qvattn.data import BatchPlan
from qvattn.models import TranslationModel
from qvattn.train.checkpoint import find_checkpoint, list_checkpoints
from qvattn.train.history import read_history
from qvattn.train.loop import Batch, Trainer, TrainingError, dropout_seed, make_accelerator
from qvattn.train.metrics import TokenSums
from qvattn.train.prepare import Prepared, prepare
from qvattn.train.recipe import Recipe, expand
from qvattn.train.run import run_training

from .conftest import MakeRecipe


def trainer_for(recipe: Recipe, run_dir: Path, prepared: Prepared | None = None) -> Trainer:
    run_dir.mkdir(parents=True, exist_ok=True)
    ready = prepared or prepare(recipe, run_dir, None)
    return Trainer(
        model=ready.model,
        spec=recipe.train,
        plan=ready.plan,
        data=ready.train,
        valid=ready.valid,
        accelerator=make_accelerator(recipe.train),
        run_dir=run_dir,
        save_model=ready.model.save_pretrained,
    )


def one_update(recipe: Recipe, run_dir: Path) -> tuple[dict[str, Tensor], float]:
    """Weights after one step, and the gradient norm before clipping."""
    trainer = trainer_for(recipe, run_dir)
    trainer.train()
    norm = float(read_history(run_dir / "history.csv")[0]["grad_norm"])
    return dict(trainer.raw_model.state_dict()), norm


class RegroupedPlan(BatchPlan):
    """One epoch of fixed batches."""

    def __init__(self, batches: Sequence[list[int]]) -> None:
        self.fixed = list(batches)

    def epoch(self, epoch: int) -> list[list[int]]:
        return self.fixed


@pytest.mark.parametrize("clip", ["null", "0.05"])
def test_accumulation_equals_one_big_batch(toy: MakeRecipe, tmp_path: Path, clip: str) -> None:
    """Micro-batches of unequal size give the gradient, the norm and the clipping of the batch they make together."""
    common = (
        "train.steps=1",
        "model.dropout=0",
        f"train.clip={clip}",
        "train.validate_every=9",
        "train.warmup_steps=0",
    )
    parts = [list(range(2)), list(range(2, 5)), list(range(5, 16))]
    results = []
    for name, batches in (("parts", parts), ("whole", [list(range(16))])):
        recipe = toy(*common, f"train.accumulate={len(batches)}")
        prepared = prepare(recipe, tmp_path, None)
        object.__setattr__(prepared, "plan", RegroupedPlan(batches))
        trainer = trainer_for(recipe, tmp_path / name, prepared)
        gradients: dict[str, Tensor] = {}
        step = trainer.optimizer.step

        def keep_gradients(
            *args: Any, trainer: Trainer = trainer, kept: dict[str, Tensor] = gradients, step: Any = step
        ) -> None:
            kept |= {n: p.grad.clone() for n, p in trainer.raw_model.named_parameters() if p.grad is not None}
            step(*args)

        trainer.optimizer.step = keep_gradients
        trainer.train()
        results.append((gradients, float(read_history(tmp_path / name / "history.csv")[0]["grad_norm"])))
    (split, split_norm), (whole, whole_norm) = results
    assert split_norm == pytest.approx(whole_norm, rel=1e-5)
    assert split.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-7)
    total = math.sqrt(sum(float(g.square().sum()) for g in split.values()))
    assert total == pytest.approx(min(split_norm, 0.05) if clip != "null" else split_norm, rel=1e-4)


def test_clipping_does_not_depend_on_the_loss_scale(toy: MakeRecipe, tmp_path: Path) -> None:
    """fp16 gradients are unscaled before they are clipped (CASES 13)."""
    overrides = ("train.steps=1", "train.clip=0.05", "train.warmup_steps=0", "train.validate_every=9")
    weights, norms = [], []
    for scale in (2.0, 65536.0):
        trainer = trainer_for(toy(*overrides, "train.precision=fp16"), tmp_path / str(scale))
        trainer.accelerator.scaler = trainer.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.train()
        weights.append(trainer.raw_model.state_dict())
        norms.append(float(read_history(tmp_path / str(scale) / "history.csv")[0]["grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert norms[0] > 0.05
    _, full = one_update(toy(*overrides), tmp_path / "fp32")
    assert norms[0] == pytest.approx(full, rel=2e-2)


def test_fp16_on_a_cpu_is_fp16(toy: MakeRecipe, tmp_path: Path) -> None:
    recipe = toy("train.precision=fp16")
    trainer = trainer_for(recipe, tmp_path)
    seen = []
    projection = trainer.raw_model.encoder.layers[0].ff.up_proj
    projection.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    trainer.evaluate(trainer.valid)
    assert set(seen) == {torch.float16}
    assert trainer.accelerator.scaler is not None


def test_variants_see_the_same_batches_and_the_same_dropout(toy: MakeRecipe, tmp_path: Path) -> None:
    names = ("qkv", "qv", "qv-ka")
    variants = ", ".join(f"{{name: {name}, attention: {name}}}" for name in names)
    recipe = toy("train.steps=4", f"compare={{baseline: qkv, seeds: [3], variants: [{variants}]}}")
    seen: dict[str, list[Tensor]] = {}
    masks: dict[str, list[Tensor]] = {}
    for plan in expand(recipe):
        trainer = trainer_for(plan.recipe, tmp_path / plan.slug)
        batches, dropped = seen.setdefault(plan.name, []), masks.setdefault(plan.name, [])
        collate = trainer.data.collate

        def watch(indices: Sequence[int], collate: Any = collate, batches: list[Tensor] = batches) -> Batch:
            batch: Batch = collate(indices)
            batches.append(batch["labels"])
            return batch

        trainer.data.collate = watch  # type: ignore[method-assign]
        stack = trainer.raw_model.encoder.layers[0]
        stack.register_forward_pre_hook(
            lambda module, inputs, dropped=dropped: dropped.append(inputs[0] == 0) if module.training else None
        )
        trainer.train()
    assert len(seen["qkv"]) == 4
    for name in names[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen["qkv"], seen[name], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(masks["qkv"], masks[name], strict=True))
    assert 0.1 < torch.cat([mask.flatten() for mask in masks["qkv"]]).double().mean() < 0.3
    assert not torch.equal(masks["qkv"][0][:1, :1], masks["qkv"][1][:1, :1])


def test_dropout_seeds_differ_in_every_part() -> None:
    seeds = {dropout_seed(a, b, c, d) for a in range(5) for b in range(5) for c in range(5) for d in range(5)}
    assert len(seeds) == 625
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_validation_is_of_the_weights_at_hand(toy: MakeRecipe, tmp_path: Path) -> None:
    """Nothing a model remembers from an earlier validation may enter a later one."""
    recipe = toy("train.steps=9", "train.validate_every=3", "train.keep_last=9", "train.learning_rate=0.05")
    run_training(recipe, tmp_path / "run")
    prepared = prepare(recipe, tmp_path / "run", None)
    rows = {row["step"]: row for row in read_history(tmp_path / "run" / "history.csv") if row["valid_loss"]}
    assert list(rows) == ["3", "6", "9"]
    for checkpoint in list_checkpoints(tmp_path / "run"):
        model = TranslationModel.from_pretrained(checkpoint.path).eval()
        sums = TokenSums()
        with torch.no_grad():
            for batch in prepared.valid:
                sums.add(model(**batch))
        assert sums.scores().loss == pytest.approx(float(rows[str(checkpoint.step)]["valid_loss"]), rel=1e-6)


def test_best_and_last_checkpoints(toy: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best outlives the last N (without its optimizer); a tie is no improvement; direction follows the metric."""
    values = iter([5.0, 2.0, 2.0, 3.0, 4.0])
    real = Trainer.evaluate

    def scripted(self: Trainer, batches: Sequence[Batch]) -> Any:
        scores = real(self, batches)
        loss = next(values, None)
        return scores if loss is None else type(scores)(**{**scores.as_dict(), "loss": loss})

    monkeypatch.setattr(Trainer, "evaluate", scripted)
    recipe = toy("train.steps=10", "train.validate_every=2", "train.best_metric=loss", "train.keep_last=2")
    results = run_training(recipe, tmp_path / "run")
    assert (results["best"]["step"], results["best"]["value"], results["best"]["metric"]) == (4, 2.0, "loss")
    assert [found.step for found in list_checkpoints(tmp_path / "run")] == [4, 8, 10]
    assert [found.resumable for found in list_checkpoints(tmp_path / "run")] == [False, True, True]
    assert find_checkpoint(tmp_path / "run").name == "step-0000004"
    assert (tmp_path / "run/checkpoints/best").resolve().name == "step-0000004"
    assert (tmp_path / "run/checkpoints/last").resolve().name == "step-0000010"
    assert results["test"]["step"] == 4
    TranslationModel.from_pretrained(tmp_path / "run/checkpoints/best")


def test_early_stopping_counts_validations_and_survives_resume(
    toy: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses by step: best at 2, then nothing better; patience 3 ends the run at step 8, resumed in between or not."""
    by_step = {2: 1.0, 4: 2.0, 6: 1.5, 8: 1.1, 10: 0.1}
    real = Trainer.evaluate

    def scripted(self: Trainer, batches: Sequence[Batch]) -> Any:
        scores = real(self, batches)
        return type(scores)(**{**scores.as_dict(), "loss": by_step[self.progress.step]})

    monkeypatch.setattr(Trainer, "evaluate", scripted)
    recipe = toy("train.steps=10", "train.validate_every=2", "train.best_metric=loss", "train.patience=3")
    whole = run_training(recipe, tmp_path / "whole")
    run_training(recipe, tmp_path / "parts", stop_at=5)
    parts = run_training(recipe, tmp_path / "parts", resume=True)
    for results in (whole, parts):
        assert (results["status"], results["stopped_early"], results["steps"]) == ("complete", True, 8)
        assert results["best"]["step"] == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loss_that_is_not_finite_stops_the_run(toy: MakeRecipe, tmp_path: Path, bad: float) -> None:
    """The step is named, the last good checkpoint stays, results.json says why."""
    recipe = toy("train.steps=10", "train.validate_every=3")
    run_training(recipe, tmp_path / "run", stop_at=3)
    weights = tmp_path / "run/checkpoints/step-0000003/model.safetensors"
    before = weights.read_bytes()
    real = TranslationModel.forward

    def poisoned(self: TranslationModel, *args: Any, **kwargs: Any) -> Any:
        output = real(self, *args, **kwargs)
        if self.training:
            poisoned.calls += 1  # type: ignore[attr-defined]
            if poisoned.calls == 4:  # type: ignore[attr-defined]
                output.loss = output.loss * bad
        return output

    poisoned.calls = 0  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TranslationModel, "forward", poisoned)
        with pytest.raises(TrainingError, match=r"^step 7: the loss is (nan|inf)"):
            run_training(recipe, tmp_path / "run", resume=True)
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["status"] == "failed"
    assert "step 7" in results["reason"]
    assert weights.read_bytes() == before
    assert max(found.step for found in list_checkpoints(tmp_path / "run")) == 6
    assert run_training(recipe, tmp_path / "run", resume=True)["status"] == "complete"


def test_validation_loss_that_is_not_finite_stops_the_run(
    toy: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trainer.evaluate

    def scripted(self: Trainer, batches: Sequence[Batch]) -> Any:
        scores = real(self, batches)
        return scores if self.progress.step < 4 else type(scores)(**{**scores.as_dict(), "loss": math.nan})

    monkeypatch.setattr(Trainer, "evaluate", scripted)
    with pytest.raises(TrainingError, match=r"^step 4: the validation loss is nan"):
        run_training(toy("train.validate_every=2"), tmp_path / "run")
    assert [found.step for found in list_checkpoints(tmp_path / "run")] == [2]


def test_learning_that_diverges_is_reported(toy: MakeRecipe, tmp_path: Path) -> None:
    recipe = toy("train.learning_rate=1e30", "train.clip=null", "train.warmup_steps=0", "train.steps=30")
    with pytest.raises(TrainingError, match=r"^step \d+: the (loss|gradient norm) is"):
        run_training(recipe, tmp_path / "run")


def test_first_bad_step_is_named_when_steps_are_checked_in_bulk(toy: MakeRecipe, tmp_path: Path) -> None:
    """On a GPU losses are looked at once a report, not to wait for every step; nothing is saved in between."""
    trainer = trainer_for(toy("train.report_every=8", "train.validate_every=8", "train.save_every=4"), tmp_path)
    trainer.check_every = 8
    norms = iter([1.0, math.nan, 1.0, 1.0])
    trainer.accelerator.clip_grad_norm_ = lambda *_: torch.tensor(next(norms))
    with pytest.raises(TrainingError, match=r"^step 2: the gradient norm is nan"):
        trainer.train()
    assert not list_checkpoints(tmp_path)
    assert trainer.progress.step == 4
