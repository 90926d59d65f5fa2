"""A healing run from a converted checkpoint to a healed one: prepares, distils, keeps the best, scores, writes.

The output folder is the run and, at the end, the checkpoint: `from_pretrained(OUT)` loads it as it loads the converted
one. The same call continues a run that was killed, to the same numbers; healing.json is written last and says that the
run is complete. The loop, its checkpoints and its history are those of `qvattn train`.

It must never look at the test text between the first score and the last.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from ...data import BatchPlan, TextDataset
from ...errors import UserError
from ...train.checkpoint import Checkpoint, discard_after, find_checkpoint, last_checkpoint
from ...train.environment import describe_environment
from ...train.history import History, read_history
from ...train.loop import Trainer, fused, make_accelerator
from ...train.recipe import TrainSpec
from ...train.run import locked, write_json
from .card import card_section
from .choose import Learner
from .curve import write_curve
from .models import digest_of, load_student, load_teacher, load_words, save_healed
from .pair import DistilledPair
from .score import Scorer, WindowScores, summary
from .spec import DEFAULT_STEPS, HealSpec, changes, dump_spec, read_spec
from .text import Windows, as_batches, cut, fingerprint, name_of, read_ids, training_windows

SPEC, PLAN, BEFORE, RESULT, HISTORY = "heal.yaml", "plan.json", "before.json", "healing.json", "history.csv"
COLUMNS = ("train_kl", "train_hidden", "valid_kl", "valid_hidden")
ADVICE = "a lower learning rate, a longer warm-up or a smaller clip"
WARM, TIMED = 1, 2
"""Steps taken and thrown away to learn how long one lasts."""


@dataclass(kw_only=True)
class _Run:
    """What a run works with."""

    spec: HealSpec
    out: Path
    learner: Learner
    pair: DistilledPair
    stored: torch.dtype
    data: TextDataset
    valid: list[dict[str, torch.Tensor]]
    tests: dict[str, Windows]
    scorers: dict[str, Scorer]
    facts: dict[str, str]


def heal(spec: HealSpec, out: str | Path, *, overwrite: bool = False, stop_at: int | None = None) -> dict[str, Any]:
    """Distil the teacher into the converted model, write the healed checkpoint to `out`, return healing.json's content.

    A run that `out` already holds is continued if `spec` is the same, and returned if it is complete.
    overwrite: delete that run first. stop_at: save after this step and return, as if a signal had come.
    `status` is `complete`, or `interrupted` after SIGTERM, Ctrl-C or `stop_at`.

    Raises UserError for what the user can mend, `TrainingError` when the loss is not finite (the last good checkpoint
    stays) and `CheckpointError` when a checkpoint cannot be written.
    """
    transformers_logging.disable_progress_bar()
    out = Path(out)
    if out.resolve() == Path(spec.converted).resolve():
        raise UserError(f"out={str(out)!r}: it is the converted checkpoint; choose another folder")
    with locked(out):
        finished = _open(spec, out, overwrite=overwrite)
        return finished or _heal(spec, out, stop_at)


def _open(spec: HealSpec, out: Path, *, overwrite: bool) -> dict[str, Any] | None:
    """Make `out` a folder of this run; the result if the run is complete."""
    if overwrite and (out / SPEC).is_file():
        for path in out.iterdir():
            if path.name != ".lock":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    contents = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    if not contents:
        (out / SPEC).write_text(dump_spec(spec), encoding="utf-8")
        return None
    if SPEC not in contents:
        raise UserError(f"out={str(out)!r} holds {contents[0]!r} and is no healing run; choose a new or empty folder")
    if changed := changes(read_spec(out / SPEC), spec):
        raise UserError(
            f"cannot continue {str(out)!r}: the recipe changed ({'; '.join(changed)}); "
            "give the same options, another folder, or --overwrite"
        )
    try:
        result = json.loads((out / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("status") == "complete" else None


def _heal(spec: HealSpec, out: Path, stop_at: int | None) -> dict[str, Any]:
    begun = time.perf_counter()
    run = _prepare(spec, out)
    before = _scores_before(run)
    checkpoint = _checkpoint(run)
    discard_after(out, checkpoint.step if checkpoint else 0)
    steps = _steps(run)
    settings = spec.train_spec(steps)
    accelerator = make_accelerator(settings)
    if accelerator.num_processes > 1:
        raise UserError("heal runs in one process; start it without accelerate launch")
    run.pair.teacher.to(accelerator.device)
    environment = describe_environment(device=accelerator.device, processes=1, precision=spec.dtype, seed=spec.seed)
    write_json(out / "environment.json", environment)
    trainer = Trainer(
        model=run.pair,
        spec=settings,
        plan=BatchPlan(run.data.lengths, max_tokens=spec.batch_tokens, seed=spec.seed),
        data=run.data,
        valid=run.valid,
        accelerator=accelerator,
        run_dir=out,
        save_model=lambda folder: _save(run, folder),
        resume=checkpoint,
        facts=run.facts,
        score=lambda: run.pair.read("train") | run.pair.read("valid"),
        columns=COLUMNS,
        best_by="valid_kl",
        optimizer=_optimizer(run, settings, accelerator.device),
        advice=ADVICE,
        name="heal",
    )
    if checkpoint is None:
        _first_row(trainer, run)
    outcome = trainer.train(stop_at=stop_at)
    progress = outcome.progress
    result: dict[str, Any] = {
        "status": "interrupted" if outcome.reason == "interrupted" else "complete",
        "teacher": name_of(spec.teacher),
        "converted": name_of(spec.converted),
        "text": [name_of(path) for path in spec.text],
        "what": spec.what,
        "lora": spec.lora,
        "learned_parameters": sum(p.numel() for p in run.learner.learning.values()),
        "steps": progress.step,
        "planned_steps": steps,
        "tokens": progress.tokens,
        "epochs": progress.tokens / run.data.target_tokens(range(len(run.data))),
        "seconds": progress.seconds,
        "train_seconds": progress.train_seconds,
        "tokens_per_second": progress.tokens / progress.train_seconds if progress.train_seconds else None,
        "best": progress.best,
        "machine": {key: environment[key] for key in ("cpu_model", "cpu_count", "threads", "device", "precision")},
        "fingerprints": run.facts,
    }
    if result["status"] == "complete":
        result |= _finish(run, before, result)
    result["session_seconds"] = time.perf_counter() - begun
    write_json(out / RESULT, result)
    return result


# -- parts -------------------------------------------------------------------------------------------------------------


def _prepare(spec: HealSpec, out: Path) -> _Run:
    student, stored = load_student(spec.converted)
    words = load_words(spec.converted)
    data, held_out = training_windows(
        spec.text, spec.valid, words, context=spec.context, valid_tokens=spec.valid_tokens
    )
    size = spec.test_window
    tests = {
        path: cut(read_ids(path, "test", words), size, path, "test")[: -(-spec.test_tokens // size)]
        for path in spec.test
    }
    _check_ids(student.config.vocab_size, data.blocks, held_out, *tests.values())
    teacher = load_teacher(spec.teacher)
    facts = {
        "converted": digest_of(student),
        "teacher": digest_of(teacher),
        "text": fingerprint(data.blocks),
        "valid": fingerprint(held_out),
    }
    layers = tuple(range(student.config.layers)) if spec.layers == "all" else spec.layers
    pair = DistilledPair(
        student,
        teacher,
        kl_weight=spec.kl_weight,
        hidden_weight=spec.hidden_weight,
        layers=() if layers == "none" else layers,
        temperature=spec.temperature,
    )
    learner = Learner(student, teacher, spec.what, rank=spec.lora, seed=spec.seed)
    rows = max(1, spec.batch_tokens // spec.context)
    return _Run(
        spec=spec,
        out=out,
        learner=learner,
        pair=pair,
        stored=stored,
        data=data,
        valid=as_batches(held_out, rows),
        tests=tests,
        scorers={path: Scorer(pair, windows) for path, windows in tests.items()},
        facts=facts,
    )


def _check_ids(vocab_size: int, *texts: Windows) -> None:
    largest = max(int(windows.max()) for windows in texts)
    if largest >= vocab_size:
        raise UserError(
            f"converted: its tokenizer gives id {largest}, its vocabulary has {vocab_size} words; "
            "the tokenizer is another model's"
        )


def _scores_before(run: _Run) -> dict[str, WindowScores]:
    """Test scores of the converted model, by text; kept, so that a continued run need not repeat them."""
    path = run.out / BEFORE
    key = {**run.facts, **{text: fingerprint(windows) for text, windows in run.tests.items()}}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["of"] == key:
            return {text: WindowScores(**scores) for text, scores in kept["scores"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = {text: scorer.score() for text, scorer in run.scorers.items()}
    write_json(path, {"of": key, "scores": {text: scores.as_dict() for text, scores in found.items()}})
    return found


def _checkpoint(run: _Run) -> Checkpoint | None:
    """The newest checkpoint, its weights loaded; None at the beginning."""
    checkpoint = last_checkpoint(run.out)
    if checkpoint is None:
        return None
    before = checkpoint.state().get("facts", {})
    changed = [name for name, value in run.facts.items() if before.get(name) != value]
    if changed:
        raise UserError(
            f"cannot continue {str(run.out)!r}: what these name is not what it was: {', '.join(changed)}; "
            "put it back, or start anew with --overwrite"
        )
    run.learner.load(checkpoint.path)
    try:
        run.pair.sums = json.loads((checkpoint.path / "sums.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {checkpoint.path}: sums.json cannot be read ({error})") from error
    return checkpoint


def _save(run: _Run, folder: Path) -> None:
    run.learner.save(folder)
    (folder / "sums.json").write_text(json.dumps(run.pair.sums), encoding="utf-8")


def _optimizer(run: _Run, settings: TrainSpec, device: torch.device) -> torch.optim.Optimizer:
    """AdamW over what learns; vectors (norms, biases) are not decayed."""
    learning = list(run.learner.learning.values())
    groups = [
        {"params": [p for p in learning if p.dim() >= 2], "weight_decay": run.spec.weight_decay},
        {"params": [p for p in learning if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=fused(device)
    )


def _steps(run: _Run) -> int:
    """Steps of the run; where minutes were given, timed once and then kept in plan.json."""
    spec = run.spec
    if spec.minutes is None:
        return spec.steps or DEFAULT_STEPS
    path = run.out / PLAN
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    per_step, per_validation = _time_a_step(run)
    left = 60 * spec.minutes - (spec.validations + 1) * per_validation
    steps = max(1, int(left / per_step))
    write_json(path, {"steps": steps, "seconds_per_step": per_step, "seconds_per_validation": per_validation})
    return steps


def _time_a_step(run: _Run) -> tuple[float, float]:
    """Seconds of one step and of one validation, measured without changing a weight."""
    settings = run.spec.train_spec(1)
    rows = max(1, run.spec.batch_tokens // run.spec.context)
    batch = run.data.collate([row % len(run.data) for row in range(rows)])
    narrow = torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.precision == "bf16")
    seconds = []
    run.pair.train()
    for _ in range(WARM + TIMED):
        begun = time.perf_counter()
        with narrow:
            loss = run.pair(**batch).loss
        assert loss is not None
        loss.backward()
        seconds.append(time.perf_counter() - begun)
        run.pair.zero_grad(set_to_none=True)
    run.pair.eval()
    begun = time.perf_counter()
    with torch.inference_mode(), narrow:
        run.pair(**run.valid[0])
    per_validation = (time.perf_counter() - begun) * len(run.valid)
    run.pair.read("train"), run.pair.read("valid")
    return settings.accumulate * sum(seconds[WARM:]) / TIMED, per_validation


def _first_row(trainer: Trainer, run: _Run) -> None:
    """The curve's first point: the converted model before any step."""
    scores = trainer.evaluate(run.valid)
    (run.out / HISTORY).unlink(missing_ok=True)
    row: dict[str, float | int] = {
        "step": 0,
        "epoch": 0,
        "tokens": 0,
        "valid_loss": scores.loss,
        "valid_perplexity": scores.perplexity,
        "valid_accuracy": scores.accuracy,
    }
    with History(run.out / HISTORY, more_columns=COLUMNS) as history:
        history.append(row | run.pair.read("valid"))


def _finish(run: _Run, before: dict[str, WindowScores], result: dict[str, Any]) -> dict[str, Any]:
    """The chosen step's weights, merged, scored and saved; the curve and the card."""
    run.learner.load(find_checkpoint(run.out, run.spec.keep))
    healed = run.learner.merge()
    if run.stored != torch.float32:  # what is scored is what is stored
        healed.to(run.stored).float()
    after = {text: scorer.score() for text, scorer in run.scorers.items()}
    more: dict[str, Any] = {
        "kept": run.spec.keep,
        "valid": _curve_ends(read_history(run.out / HISTORY), result["best"]),
    }
    more["test"] = [{"text": name_of(text), **summary(before[text], after[text])} for text in run.tests]
    more["test_windows"] = [{"before": before[t].as_dict(), "after": after[t].as_dict()} for t in run.tests]
    write_curve(run.out / HISTORY, run.out / "healing.html", title=f"Healing {name_of(run.spec.converted)}")
    save_healed(healed, run.spec.converted, run.out, run.stored, card_section(result | more))
    for checkpoint in (run.out / "checkpoints").glob("step-*/optimizer.pt"):
        checkpoint.unlink()  # a complete run is never continued, and they are the largest files
    return more


def _curve_ends(rows: Sequence[dict[str, str]], best: dict[str, Any] | None) -> dict[str, float | None]:
    """Perplexity and KL of the curve's text at step 0, at the best step and at the last."""
    validated = [row for row in rows if row.get("valid_perplexity")]
    ends: dict[str, float | None] = {}
    for when, row in (("before", validated[0]), ("last", validated[-1])):
        ends |= {when: float(row["valid_perplexity"]), f"{when}_kl": float(row["valid_kl"])}
    return ends | {"best": best["perplexity"] if best else None, "best_kl": best["value"] if best else None}
